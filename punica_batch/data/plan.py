"""``plan.json``: what binds a job, written once and never changed.

A later run of the same output must agree with all of it: format, options that change the result, model, tokenizer and
templates (as the caller's binding says), input files, rows, parts and shards. Storage options are never in it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from punica_batch.config import BINDING_FIELDS, JobConfig
from punica_batch.config_sources import flag_name
from punica_batch.data.files import FileIdentity
from punica_batch.data.paths import whole
from punica_batch.data.source import Source
from punica_batch.errors import BindingError
from punica_batch.types import JsonDict

FORMAT = 2  # 1: with SHA-256 of adapters' weights, not BLAKE3
_SHOWN_CHARACTERS = 60
# What is bound by content, whichever flag it comes from.
_NAMES = {"model_sha256": "the model", "tokenizer_sha256": "the tokenizer", "chat_template": "the chat template"}


@dataclass(frozen=True)
class Plan:
    """``created``: seconds since 1970. ``shards``: of how many machines; ``num_parts`` in all, at least 1.

    ``command`` binds nothing: how inputs, model and adapters were named, with whole paths, so that ``retry`` need not
    be told.
    """

    binding: JsonDict
    inputs: list[JsonDict]
    num_rows: int
    num_parts: int
    rows_per_part: int
    shards: int
    format: int = FORMAT
    created: int = field(default_factory=lambda: int(time.time()))
    command: JsonDict = field(default_factory=dict)

    @classmethod
    def of(cls, config: JobConfig, binding: JsonDict, source: Source) -> Plan:
        whole = {**config.binding(), **binding}
        return cls(
            binding=json.loads(json.dumps(whole)),
            inputs=[asdict(file) for file in source.files],
            num_rows=source.num_rows,
            num_parts=max(1, -(-source.num_rows // config.rows_per_shard)),
            rows_per_part=config.rows_per_shard,
            shards=config.shard_of[1],
            command=_command(config),
        )

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Plan:
        """Raises ``BindingError`` for another format and for what is no plan."""
        try:
            values = json.loads(data)
            if values["format"] != FORMAT:
                raise BindingError(
                    f"{where} has format {values['format']}, this version writes {FORMAT}: "
                    "go on with the version that wrote it, or start over with `run --overwrite`"
                )
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise BindingError(f"{where} is damaged: start over with `run --overwrite`") from error

    def shard_parts(self, index: int) -> range:
        """The parts of shard ``index`` (from 0)."""
        return range(index * self.num_parts // self.shards, (index + 1) * self.num_parts // self.shards)

    def part_rows(self, part: int) -> range:
        start = part * self.rows_per_part
        return range(start, min(start + self.rows_per_part, self.num_rows))

    def changes(self, now: Plan) -> list[str]:
        """What differs in ``now``, one sentence each."""
        found = []
        for key in sorted(self.binding.keys() | now.binding.keys()):
            old, new = self.binding.get(key), now.binding.get(key)
            if old != new:
                found.append(_change(key, old, new))
        found += _file_changes(self.inputs, now.inputs)
        if self.num_rows != now.num_rows and not found:
            found.append(_change("rows", self.num_rows, now.num_rows))
        if self.shards != now.shards:
            found.append(_change("the N of --shard I/N", self.shards, now.shards))
        return found


def _command(config: JobConfig) -> JsonDict:
    """``named``: which columns the user chose by name, since a default may be ambiguous where a choice is not."""
    columns = {"prompt_column", "messages_column", "lora_column"}
    return {
        "inputs": [whole(name) for name in config.inputs],
        "model": _folder_or_name(config.model),
        "revision": config.revision,
        "tokenizer": _folder_or_name(config.tokenizer),
        "adapters": None if config.adapters is None else whole(config.adapters),
        "lora_modules": {name: whole(path) for name, path in config.lora_modules.items()},
        "named": sorted(columns & config.model_fields_set),
    }


def _folder_or_name(name: str | None) -> str | None:
    """A hub's name stays as it is."""
    return whole(name) if name is not None and os.path.isdir(os.path.expanduser(name)) else name


def _change(key: str, old: Any, new: Any) -> str:
    shown = ["not given" if value is None else json.dumps(value, ensure_ascii=False) for value in (old, new)]
    name = _NAMES.get(key) or (flag_name(key) if key in BINDING_FIELDS else key)
    if max(map(len, shown)) > _SHOWN_CHARACTERS or "template" in key:
        return f"{name} has changed"
    return f"{name} was {shown[0]}, is {shown[1]}"


def _same(path: str) -> str:
    """What two names of one file have in common: a folder may be reached through a symlink."""
    return path if "://" in path else os.path.realpath(path)


def _file_changes(old: list[JsonDict], new: list[JsonDict]) -> list[str]:
    before, after = ({_same(file["path"]): FileIdentity(**file) for file in files} for files in (old, new))
    for path in before.keys() - after.keys():
        return [f"input {path} is no longer there"]
    for path in after.keys() - before.keys():
        return [f"input {path} is new"]
    for path, identity in before.items():
        now = after[path]
        names = [name for name in ("size", "mtime", "footer", "rows") if getattr(identity, name) != getattr(now, name)]
        if names:
            return [f"input {path} has changed ({', '.join(names)})"]
    orders = [[_same(file["path"]) for file in files] for files in (old, new)]
    return [] if orders[0] == orders[1] else ["the order of the inputs"]
