"""The flags of a job, one table for all commands that take a job. Imports nothing slow: ``--help`` reads it.

A flag that is not given is None, so that environment, job file and default can speak; ``given`` turns what typer
parsed into ``JobConfig`` values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from punica_batch.errors import UsageError

if TYPE_CHECKING:
    from punica_batch.config import JobConfig

MODEL, PROMPT, SAMPLING = "Model and adapters", "Prompts", "Sampling"
DATA, JOB, ENGINE = "Rows and columns", "Job", "Devices and memory"


@dataclass(frozen=True, slots=True)
class Flag:
    """One ``JobConfig`` field on the command line. ``type`` is str, int, float, bool or list[str] (repeated)."""

    field: str
    type: Any
    panel: str
    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()

    @property
    def declarations(self) -> tuple[str, ...]:
        return self.names or ("--" + self.field.replace("_", "-"),)


FLAGS = (
    Flag("output", str, DATA, "File, or folder (x/). Default: INPUT.generations.parquet.", "PATH", ("--output", "-o")),
    Flag("model", str, MODEL, "Hugging Face folder or hub name of the base model.", "PATH"),
    Flag("revision", str, MODEL, "Revision of a hub model.", "NAME"),
    Flag("tokenizer", str, MODEL, "Tokenizer folder. Default: the model's.", "PATH"),
    Flag("dtype", str, MODEL, "auto, float32, float16 or bfloat16. Default: auto.", "TYPE"),
    Flag("adapters", str, MODEL, "Folder of adapter folders, or a TOML registry.", "PATH"),
    Flag("lora_modules", list[str], MODEL, "One more adapter; repeat for several.", "NAME=PATH"),
    Flag("chat_template", str, PROMPT, "jinja2 chat template, in place of the model's.", "PATH"),
    Flag("apply_chat_template", bool, PROMPT, "Make `prompt` a user's message. --no-… turns it off."),
    Flag("max_tokens", int, SAMPLING, "Tokens to generate at most. Default: 256.", "N"),
    Flag("temperature", float, SAMPLING, "Default: 0 (greedy).", "X"),
    Flag("top_p", float, SAMPLING, "Default: 1.", "X"),
    Flag("top_k", int, SAMPLING, "Default: 0 (all).", "N"),
    Flag("min_p", float, SAMPLING, "Default: 0.", "X"),
    Flag("stop", list[str], SAMPLING, "Stop string, taken verbatim; repeat for several.", "TEXT"),
    Flag("seed", int, SAMPLING, "The job's seed. Default: 0.", "N"),
    Flag("n", int, SAMPLING, "Samples a row; the output columns become lists.", "N"),
    Flag("logprobs", int, SAMPLING, "Add token ids and log-probabilities of the K likeliest tokens.", "K"),
    Flag("ignore_eos", bool, SAMPLING, "Go on past the end of sequence. --no-… turns it off."),
    Flag("prompt_column", str, DATA, "Default: prompt.", "NAME"),
    Flag("messages_column", str, DATA, "Default: messages.", "NAME"),
    Flag("lora_column", str, DATA, "Default: lora_id.", "NAME"),
    Flag("id_column", str, DATA, "Default: id.", "NAME"),
    Flag("prompt_template", str, PROMPT, "Make the prompt from columns: 'Review: {review}'.", "TEXT"),
    Flag("columns", list[str], DATA, "Input columns to carry, a,b,c. Default: all.", "NAMES"),
    Flag("output_prefix", str, DATA, "Prefix of the output's columns.", "TEXT"),
    Flag("limit", int, DATA, "Only the first N rows.", "N"),
    Flag("overlong", str, PROMPT, "Prompts beyond the context: error or truncate-left. Default: error.", "WHAT"),
    Flag("storage_options", list[str], DATA, "fsspec option; repeat for several.", "K=V", ("--storage-option",)),
    Flag("on_error", str, JOB, "record a bad row and go on, or raise. Default: record.", "WHAT"),
    Flag("max_errors", str, JOB, "Stop when more rows than this fail: N or P%. Default: 5%.", "N|P%"),
    Flag("rows_per_shard", int, JOB, "Rows a part. Default: 10000.", "N"),
    Flag("shard", str, JOB, "Do slice I of N, on N machines.", "I/N"),
    Flag("overwrite", bool, JOB, "Start over; old output stays until the new is complete.", None, ("--overwrite",)),
    Flag("grace", float, JOB, "Time to stop in after a signal. Default: 20.", "SECONDS"),
    Flag("max_runtime", float, JOB, "Stop after this time, as by a signal.", "SECONDS"),
    Flag("work_dir", str, JOB, "Folder for the journal of a remote output.", "PATH"),
    Flag("device", str, ENGINE, "auto, cpu or cuda. Default: auto.", "TYPE"),
    Flag("gpus", str, ENGINE, "How many GPUs, or which: 8, or 0,2,3. Default: all.", "N|LIST"),
    Flag("workers", int, ENGINE, "CPU workers, with --device cpu. Default: 1.", "N"),
    Flag("pack", str, ENGINE, "busiest or spread: where new rows go. Default: busiest.", "HOW"),
    Flag("gpu_memory_utilization", float, ENGINE, "Share of a device's memory to use. Default: 0.9.", "X"),
    Flag("max_model_len", int, ENGINE, "Longest prompt and answer, in tokens. Default: the model's.", "N"),
    Flag("max_num_seqs", int, ENGINE, "Sequences in a batch. Default: what memory allows, at most 256.", "N"),
    Flag("max_num_batched_tokens", int, ENGINE, "Tokens in a step.", "N"),
    Flag("max_loras", int, ENGINE, "Adapters on a device at a time.", "N"),
    Flag("max_lora_rank", int, ENGINE, "Refuse adapters of a higher rank. Default: what the adapters need.", "N"),
    Flag("block_size", int, ENGINE, "Tokens in a KV block. Default: 16.", "N"),
    Flag("kv_cache_dtype", str, ENGINE, "auto, float32, float16 or bfloat16. Default: auto (the model's).", "TYPE"),
)  # fmt: skip


def _remember_verbose(context: typer.Context, value: bool) -> bool:
    if value and isinstance(context.obj, dict):
        context.obj["verbose"] = True
    return value


Inputs = Annotated[
    list[str] | None,
    typer.Argument(help="Parquet files, folders, globs or URLs; OpenAI Batch JSONL.", metavar="INPUT..."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr; errors still.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_remember_verbose, help="Add the traceback to an error.")
]

_NO = "no_"
_CAN_BE_DENIED = ("apply_chat_template", "ignore_eos")

# What ``--help`` says of ``--config``: of a command with an input, without one, and that reads no file unless told.
INPUT_CONFIG = "Job file. Default: punica-batch.toml beside the input, else in the current folder."
FOLDER_CONFIG = "Job file. Default: punica-batch.toml in the current folder."
NAMED_CONFIG = "Job file. Default: none; a punica-batch.toml that is only there is not read."


def takes_job_flags(
    fields: Iterable[str] | None = None,
    *,
    config_help: str = INPUT_CONFIG,
    texts: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command the job's flags (those of ``fields``, else all) and ``--config``.

    ``texts``: help by field, where a flag means something of its own here. The command's function declares its own
    parameters and ends with ``**job``, which receives what ``given`` reads.
    """
    own_texts = texts or {}
    chosen = [
        replace(flag, help=own_texts.get(flag.field, flag.help))
        for flag in FLAGS
        if fields is None or flag.field in set(fields)
    ]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [
            _parameter("config", _config_option(config_help)),
            *(_parameter(flag.field, _annotation(flag)) for flag in chosen),
        ]
        added += [_parameter(_NO + flag.field, _negation(flag)) for flag in chosen if flag.field in _CAN_BE_DENIED]
        keyword = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
        function.__signature__ = signature.replace(parameters=keyword + added)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in keyword + added}
        return function

    return decorate


def load_job(inputs: Sequence[str] | None, job: Mapping[str, Any]) -> JobConfig:
    """The job of a command line: its inputs and its job flags, with what environment and job file add."""
    from punica_batch.config_sources import load_config

    config = load_config(inputs or (), given(job), config=job.get("config"))
    if not config.inputs:
        raise UsageError("no INPUT is given: name a Parquet file, a folder, a glob or a URL")
    return config


def given(job: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, as ``JobConfig`` values by field. Raises ``UsageError``."""
    from punica_batch.config_sources import flag_name, parse_pairs

    values: dict[str, Any] = {}
    for field, value in job.items():
        if field == "config" or value is None or value == []:
            continue
        if field.startswith(_NO):
            field, value = field.removeprefix(_NO), not value
        if field in ("lora_modules", "storage_options"):
            value = parse_pairs(flag_name(field), value)
        elif field == "columns":
            value = tuple(name for names in value for name in names.split(","))
        elif isinstance(value, list):
            value = tuple(value)
        values[field] = value
    return values


def _config_option(text: str) -> Any:
    return Annotated[str | None, typer.Option("--config", help=text, metavar="FILE", rich_help_panel=JOB)]


def _negation(flag: Flag) -> Any:
    """``--no-x`` for a job file's ``x = true``. Not in ``--help``: it would leave no room for the names there."""
    return Annotated[bool | None, typer.Option("--no-" + flag.declarations[0][2:], hidden=True)]


def _annotation(flag: Flag) -> Any:
    option = typer.Option(*flag.declarations, help=flag.help, metavar=flag.metavar, rich_help_panel=flag.panel)
    return Annotated[flag.type | None, option]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
