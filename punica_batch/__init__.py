"""punica-batch: a dataset through one base model and thousands of LoRA adapters, offline.

>>> from punica_batch import JobConfig, run_job
>>> run_job(JobConfig(inputs=("requests.parquet",), model="model", adapters="adapters"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from punica_batch.config import JobConfig
    from punica_batch.engine.generate import Engine
    from punica_batch.job.runner import run_job
    from punica_batch.types import SamplingParams

__all__ = ["Engine", "JobConfig", "SamplingParams", "run_job"]
__version__ = "0.1.0"

# Loaded at first use: `punica-batch --help` must not wait for pyarrow, and the parent of a job never loads torch.
_HOME = {
    "Engine": "punica_batch.engine.generate",
    "JobConfig": "punica_batch.config",
    "SamplingParams": "punica_batch.types",
    "run_job": "punica_batch.job.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'punica_batch' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
