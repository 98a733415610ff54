"""``punica-batch adapters ls`` and ``adapters check``: what the registry holds, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from punica_batch.commands.options import FOLDER_CONFIG, Json, Verbose, given, takes_job_flags

if TYPE_CHECKING:
    from punica_batch.config import JobConfig
    from punica_batch.planning.adapters import AdapterDetails

app = typer.Typer(help="The adapters that a job may name.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="Only these adapters. Default: all.", metavar="[NAME]...")]
_FIELDS = ("adapters", "lora_modules", "model", "revision", "max_lora_rank", "storage_options")


@app.command("ls")
@takes_job_flags(_FIELDS, config_help=FOLDER_CONFIG)
def ls(names: Names = None, json: Json = False, verbose: Verbose = False, **job: Any) -> int:
    """List the adapters: ranks, targets, size, digest, and what is wrong with them. Exit 4 for a NAME that is none."""
    reports = _report(_config(job), names, contents=False)
    _show(reports, as_json=json)
    return 4 if any(report.is_unknown for report in reports) else 0


@app.command("check")
@takes_job_flags(_FIELDS, config_help=FOLDER_CONFIG)
def check(names: Names = None, json: Json = False, verbose: Verbose = False, **job: Any) -> int:
    """Fit every adapter into the model, when one is named, and read its numbers. Exit 4 if one has a problem."""
    reports = _report(_config(job), names, contents=True)
    _show(reports, as_json=json)
    return 4 if any(report.problem for report in reports) else 0


def _config(job: dict[str, Any]) -> JobConfig:
    from punica_batch.config_sources import load_config
    from punica_batch.errors import UsageError

    config = load_config((), given(job), config=job.get("config"))
    if config.adapters is None and not config.lora_modules:
        raise UsageError(
            "no adapters are named: give --adapters FOLDER or --lora-modules NAME=PATH, --config FILE with `adapters` "
            "in it, or PUNICA_BATCH_ADAPTERS"
        )
    return config


def _report(config: JobConfig, names: list[str] | None, *, contents: bool) -> list[AdapterDetails]:
    from punica_batch.adapters.registry import Registry
    from punica_batch.models.config import ModelConfig, resolve_model
    from punica_batch.planning.adapters import describe_adapters

    registry = Registry.open(config)
    model = ModelConfig.from_folder(resolve_model(config.model, config.revision)) if config.model is not None else None
    modules = model.lora_modules() if model is not None else None
    return describe_adapters(registry, names or registry.names(), config, modules, contents=contents)


def _show(reports: list[AdapterDetails], *, as_json: bool) -> None:
    from dataclasses import asdict

    from punica_batch.ui.adapters import adapters_table
    from punica_batch.ui.console import emit, emit_json, render

    if as_json:
        emit_json({"schema_version": 1, "adapters": [asdict(report) for report in reports]})
    else:
        emit(render(adapters_table(reports)))
