"""``punica-batch retry``: run an output's error rows again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from punica_batch.commands.options import NAMED_CONFIG, Json, Quiet, Verbose, given, takes_job_flags

Output = Annotated[str, typer.Argument(help="The output of an earlier run.", metavar="OUTPUT")]
# What binds a job cannot change; what it ran on, and where its model and adapters are, can.
_FIELDS = (
    "model", "revision", "tokenizer", "adapters", "lora_modules", "storage_options", "work_dir", "max_errors",
    "on_error", "grace", "max_runtime", "shard", "device", "gpus", "workers", "pack", "gpu_memory_utilization",
    "max_num_seqs", "max_num_batched_tokens", "max_loras", "max_lora_rank", "block_size",
)  # fmt: skip


_HELP = {
    "model": "Where the same model lies now. Default: as in the run.",
    "revision": "Revision of a hub model. Default: as in the run.",
    "tokenizer": "Where the same tokenizer lies now. Default: as in the run.",
    "adapters": "Registry in place of the run's; --lora-modules adds to that one. Default: the run's.",
    "lora_modules": "One more adapter, or a repaired one's path; repeat for several.",
    "max_errors": "Of an unfinished output: stop when more rows than this fail in all. Default: 5%.",
    "on_error": "record a row that fails again and go on, or raise. Default: record.",
}


@takes_job_flags(_FIELDS, config_help=NAMED_CONFIG, texts=_HELP)
def retry(output: Output, json: Json = False, quiet: Quiet = False, verbose: Verbose = False, **job: Any) -> int:
    """Run the error rows of OUTPUT again, with repaired adapters if need be. All other rows stay as they are. The
    input must be as it was."""
    from punica_batch.planning.retry import retry_config

    config = retry_config(output, given(job), config=job.get("config"))

    from punica_batch.job.retry import retry_job
    from punica_batch.ui.console import emit, emit_json, render
    from punica_batch.ui.progress import make_progress
    from punica_batch.ui.summary import summary_view

    progress = make_progress(quiet=quiet)
    try:
        summary = retry_job(config, progress)
    finally:
        progress.close()
    if json:
        emit_json(summary.as_dict())
    else:
        emit(render(summary_view(summary, is_retry=True)))
    return summary.exit_code
