"""A plan for people: the facts, where the memory goes, the adapters with most rows, the first tokens of a row."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from punica_batch.planner.plan import AdapterRows, Plan, Preview
from punica_batch.ui.format import count, errors, plural, size
from punica_batch.ui.summary import facts_view

TOP = 8


def plan_view(plan: Plan) -> RenderableType:
    views: list[RenderableType] = [facts_view(_facts(plan))]
    if plan.memory is not None:
        views += [Text("\nmemory of each worker", style="bold"), *(Text(f"  {line}") for line in plan.memory.reasons)]
    if plan.adapters.top:
        views += [Text("\nadapters with most rows", style="bold"), _adapters(plan.adapters.top[:TOP])]
    views += [_preview(preview) for preview in plan.previews]
    views += [Text(f"problem: {entry.problem} ({plural(entry.rows, 'row')})", style="red") for entry in _problems(plan)]
    if plan.errors.stops:
        stops = f"{plural(plan.errors.rows, 'row')} would fail, --max-errors allows {count(plan.errors.limit)}"
        views.append(Text(f"run would stop: {stops}", style="bold red"))
    views += [Text(f"warning: {line}", style="yellow") for line in plan.warnings]
    return Group(*views)


def _facts(plan: Plan) -> dict[str, str]:
    tokens, adapters, placement = plan.tokens, plan.adapters, plan.placement
    about = "" if tokens.exact else "about "
    basis = "all rows tokenized" if tokens.exact else f"from {count(tokens.sampled_rows)} rows; --exact reads all"
    files = plural(len(plan.inputs), "file")
    ranks = ", ".join(f"{number} of rank {rank}" for rank, number in plan.adapters.ranks.items())
    facts = {
        "model": plan.model,
        "input": f"{count(plan.rows)} rows of {files} ({size(sum(file.nbytes for file in plan.inputs))})",
        "prompt tokens": f"{about}{count(tokens.prompt_tokens)}, {tokens.mean_prompt_tokens:.0f} a row, "
        f"at most {count(tokens.max_prompt_tokens)} ({basis})",
        "generated": f"{count(plan.samples)} answers, at most {count(tokens.max_generated_tokens)} tokens",
        "adapters": f"{'' if adapters.exact else 'at least '}{count(adapters.count)}"
        + (f" ({ranks})" if ranks else "")
        + (f", {count(adapters.base_rows)} rows for the base model" if adapters.base_rows else ""),
        "workers": f"{placement.workers_used} of {placement.workers} on {placement.device}, {placement.pack}",
        "window": f"{count(plan.window.max_rows)} rows, {size(plan.window.max_bytes)}: "
        f"{count(plan.window.mean_group_rows)} rows of an adapter meet in it",
        "output": f"{plan.parts.path} ({plural(plan.parts.count, 'part')} of "
        f"{count(plan.parts.rows_per_part)} rows{', then one file' if plan.parts.single_file else ''})",
    }
    if plan.errors.rows:
        facts["would fail"] = f"{count(plan.errors.rows)} rows ({errors(plan.errors.by_code)})"
    return facts


def _adapters(entries: tuple[AdapterRows, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("  adapter", no_wrap=True)
    for name in ("rows", "rank", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        rank = str(entry.rank) if entry.rank is not None else "–"
        weight = size(entry.nbytes) if entry.nbytes is not None else "–"
        table.add_row(Text(f"  {entry.lora_id}"), count(entry.rows), rank, weight)
    return table


def _preview(preview: Preview) -> Text:
    """⟨1 <s>⟩⟨529 How⟩ …: ids and the vocabulary's own strings, so that a doubled BOS shows."""
    adapter = "base model" if preview.lora_id is None else preview.lora_id
    text = Text(f"\nfirst tokens of row {preview.row} ({adapter})\n", style="bold")
    for token in preview.tokens:
        text.append(f"⟨{token.id} ", style="dim")
        text.append(token.token if token.token.isprintable() else repr(token.token)[1:-1], style="not bold cyan")
        text.append("⟩", style="dim")
    return text


def _problems(plan: Plan) -> tuple[AdapterRows, ...]:
    return plan.adapters.problems[:TOP]
