"""``retry``: the job of an output, from what its ``plan.json`` says and what may have changed since."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from punica_batch.config import BINDING_FIELDS, JobConfig
from punica_batch.config_sources import load_config
from punica_batch.data.layout import Layout
from punica_batch.data.plan import Plan
from punica_batch.planning.status import no_output

_COMMAND = ("model", "revision", "tokenizer", "adapters", "lora_modules")


def retry_config(output: str, flags: Mapping[str, Any], *, config: str | None = None) -> JobConfig:
    """The job that made ``output``. Its inputs and what binds it are taken from its plan, whatever else is said; model
    and adapters, too, unless ``flags`` or the job file ``config`` name others (a repaired registry, say), one by one
    those of ``lora_modules``. The environment is not asked: it may have been overruled then.

    Raises ``InputError`` when there is no plan, and what ``load_config`` raises.
    """
    told = load_config((), flags, config=config, environ={}, search=False)
    plan = read_plan(output, told)
    usual = JobConfig().binding()
    values: dict[str, Any] = {name: plan.command[name] for name in _COMMAND if plan.command[name]}
    if plan.shards > 1:
        values["shard"] = f"1/{plan.shards}"  # a finished output is retried whole, whichever slice is said
    values |= {name: getattr(told, name) for name in told.model_fields_set if name not in BINDING_FIELDS}
    values["lora_modules"] = {**plan.command["lora_modules"], **told.lora_modules}
    # A column that was named is looked up otherwise than a default that has the same name.
    named = [field for field in BINDING_FIELDS if field in plan.command["named"] or plan.binding[field] != usual[field]]
    values |= {field: plan.binding[field] for field in named}
    return JobConfig.model_validate({**values, "inputs": plan.command["inputs"], "output": output})


def retry_command(config: JobConfig, output: str) -> str:
    """What to type to run the error rows of ``config``'s output, shown as ``output``, again."""
    words = ["punica-batch", "retry", output]
    for flag, value in (("--shard", config.shard), ("--work-dir", config.work_dir)):
        words += [flag, value] if value is not None else []
    return shlex.join(words)


def read_plan(output: str, config: JobConfig) -> Plan:
    """The plan of ``output``, reached as ``config`` says. Raises ``InputError`` when it has none."""
    layout = Layout.of_output(output, config)
    name = layout.in_state("plan.json")
    data = layout.store.read(name)
    if data is None:
        raise no_output(layout)
    return Plan.from_bytes(data, layout.store.shown(name))
