"""A plan for people: the facts, where the memory goes, the adapters with most rows, the first tokens of a row."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from punica_batch.planner.plan import AdapterRows, PlacementSummary, Plan, Preview, PreviewToken
from punica_batch.ui.format import count, errors, kib, plural, size
from punica_batch.ui.summary import facts_view

TOP = 8


def plan_view(plan: Plan) -> RenderableType:
    views: list[RenderableType] = [facts_view(_facts(plan))]
    if plan.memory is not None:
        views += [Text("\nmemory of each worker", style="bold"), *(_indented(line) for line in plan.memory.reasons)]
    if plan.adapters.top:
        views += [Text("\nadapters with most rows", style="bold"), _adapters(plan.adapters.top[:TOP])]
    views += [view for preview in plan.previews for view in _preview(preview)]
    views += [Text(f"problem: {entry.problem} ({plural(entry.rows, 'row')})", style="red") for entry in _problems(plan)]
    if plan.errors.stops:
        stops = f"{plural(plan.errors.rows, 'row')} would fail, {plan.errors.allowance}"
        views.append(Text(f"run would stop: {stops}", style="bold red"))
    views += [Text(f"warning: {line}", style="yellow") for line in plan.warnings]
    return Group(*views)


def _facts(plan: Plan) -> dict[str, str]:
    tokens, adapters, placement = plan.tokens, plan.adapters, plan.placement
    about = "" if tokens.exact else "about "
    basis = "all rows tokenized" if tokens.exact else f"from {plural(tokens.sampled_rows, 'row')}; --exact reads all"
    files = plural(len(plan.inputs), "file")
    kinds = [f"{number} of rank {rank}" for rank, number in adapters.ranks.items()]
    kinds += [f"{len(adapters.problems)} missing or bad"] if adapters.problems else []
    facts = {
        "model": plan.model,
        "input": f"{plural(plan.rows, 'row')} of {files} ({size(sum(file.nbytes for file in plan.inputs))})",
        "prompt tokens": f"{about}{count(tokens.prompt_tokens)}, {tokens.mean_prompt_tokens:.0f} a row, "
        f"at most {count(tokens.max_prompt_tokens)} ({basis})",
        "generated": f"{plural(plan.samples, 'answer')}, at most {plural(tokens.max_generated_tokens, 'token')}",
        "adapters": f"{'' if adapters.exact else 'at least '}{count(adapters.count)}"
        + (f" ({', '.join(kinds)})" if kinds else "")
        + (f", {plural(adapters.base_rows, 'row')} for the base model" if adapters.base_rows else ""),
        "workers": _workers(placement),
        "read ahead": f"at most {count(plan.window.max_rows)} rows ({size(plan.window.max_bytes)}), so that rows of "
        f"one adapter can run together: about {count(plan.window.mean_group_rows)} of each at a time",
        "output": f"{plan.parts.path} ({plural(plan.parts.count, 'part')} of "
        f"{plural(plan.parts.rows_per_part, 'row')}{', then one file' if plan.parts.single_file else ''})",
    }
    if plan.option_columns:
        facts["row options"] = f"from the columns {', '.join(plan.option_columns)}"
    if plan.errors.rows:
        facts["would fail"] = f"{plural(plan.errors.rows, 'row')} ({errors(plan.errors.by_code)})"
    return facts


def _adapters(entries: tuple[AdapterRows, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("  adapter", no_wrap=True)
    for name in ("rows", "rank", "in memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        rank = str(entry.rank) if entry.rank is not None else "–"
        weight = kib(entry.nbytes) if entry.nbytes is not None else "–"
        table.add_row(Text(f"  {entry.lora_id}"), count(entry.rows), rank, weight)
    return table


def _indented(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)


def _workers(placement: PlacementSummary) -> str:
    workers = plural(placement.workers, {"cpu": "CPU worker", "cuda": "GPU worker"}[placement.device])
    if placement.workers == 1:
        return workers
    how = "each is filled before the next gets rows" if placement.pack == "busiest" else "all get the same share"
    few = "" if placement.workers_used == placement.workers else f"; the job fills {count(placement.workers_used)}"
    return f"{workers}: {how} (--pack {placement.pack}){few}"


def _preview(preview: Preview) -> tuple[RenderableType, ...]:
    adapter = "base model" if preview.lora_id is None else preview.lora_id
    return Text(f"\nfirst tokens of row {preview.row} ({adapter})", style="bold"), _Tokens(preview.tokens)


class _Tokens:
    """⟨1 <s>⟩⟨529 How⟩ …: ids and the vocabulary's own strings, so that a doubled BOS shows. Lines end between
    tokens."""

    def __init__(self, tokens: tuple[PreviewToken, ...]) -> None:
        self._tokens = tokens

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for token in self._tokens:
            name = token.token if token.token.isprintable() else repr(token.token)[1:-1]
            if line and line.cell_len + cell_len(f"⟨{token.id} {name}⟩") > options.max_width:
                yield line
                line = Text()
            line.append(f"⟨{token.id} ", style="dim").append(name, style="cyan").append("⟩", style="dim")
        yield line


def _problems(plan: Plan) -> tuple[AdapterRows, ...]:
    return plan.adapters.problems[:TOP]
