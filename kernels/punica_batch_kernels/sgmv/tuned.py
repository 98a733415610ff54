"""Tables of measured kernel configurations, one JSON file a kind of device; the package ships one for the H200."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

FOLDER = Path(__file__).parent / "tables"


class TableKey(NamedTuple):
    """What an entry is for: a family's ``block_m``, tiles and ranks by bucket, the group's shape, bytes an element."""

    block_m: int
    num_tiles: int
    in_features: int
    widths: tuple[int, ...]
    max_rank: int
    itemsize: int


def read_table(device: str) -> Iterator[tuple[TableKey, dict[str, int], dict[str, int]]]:
    """Each entry's key, shrink and expand configuration; none where there is no table for ``device``."""
    path = FOLDER / f"{device}.json"
    if not device or not path.exists():
        return
    for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
        key = {name: entry[name] for name in TableKey._fields}
        yield TableKey(**key | {"widths": tuple(entry["widths"])}), entry["shrink"], entry["expand"]


def save_table(entries: Iterable[Mapping[str, Any]], path: Path, description: str) -> None:
    """Writes ``tuning.tune``'s entries, an entry a line. ``description``: the device and versions measured."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    path.write_text(f'{{"description": {json.dumps(description)}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")


@cache
def device_name(device: torch.device) -> str:
    """As tables are named: the model without its variants, "h200" of "NVIDIA H200"; "" for a CPU."""
    if device.type != "cuda":
        return ""
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return next((word for word in words if re.fullmatch(r"[a-z]+\d+[a-z]*", word)), "")
