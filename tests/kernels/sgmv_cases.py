"""Groups, segments and a float64 oracle for the device SGMV kernels: used in Triton's interpreter and on the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from punica_batch_kernels.sgmv.slot_table import SlotTables
from punica_batch_kernels.sgmv.tiles import RowTiles, build_tiles, cut_tiles, take_all_rows
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
AddLora = Callable[[Tensor, Tensor, LoraGroup, Segments], None]


def padded(elements: int) -> int:
    return -(-elements // 64) * 64


def make_slot(ranks: Sequence[int], in_features: int, widths: Sequence[int], like: Tensor) -> SlotWeights | None:
    """One adapter as the engine packs it, in a buffer of its own whose gaps hold NaN."""
    if not any(ranks):
        return None
    present = [(rank, width) for rank, width in zip(ranks, widths, strict=True) if rank]
    sizes = [sum(ranks) * in_features, *(rank * width for rank, width in present)]
    flat = like.new_full((sum(map(padded, sizes)) + 64,), math.nan)
    pieces, start = [], 0
    for size in sizes:
        piece = flat[start : start + size]
        piece.copy_(torch.randn(size, device=like.device) / math.sqrt(in_features if not pieces else 4))
        pieces.append(piece)
        start += padded(size)
    bs = iter(pieces[1:])
    b = tuple(next(bs).view(rank, width).t() if rank else None for rank, width in zip(ranks, widths, strict=True))
    return SlotWeights(pieces[0].view(sum(ranks), in_features), b, tuple(ranks))


def make_group(
    ranks: Sequence[Sequence[int]], in_features: int, widths: Sequence[int], like: Tensor, max_rank: int | None = None
) -> LoraGroup:
    """A group with a slot for each entry of ``ranks`` (one rank a slice), and its slot table."""
    offsets = (0, *np.cumsum(widths).tolist())
    group = LoraGroup(in_features, offsets, [make_slot(r, in_features, widths, like) for r in ranks])
    SlotTables([group], max_rank or max(map(max, ranks)), like.dtype, like.device)
    return group


def popularity(kind: str, rows: int, slots: int) -> list[tuple[int, int]]:
    """(slot, rows) of each segment."""
    if kind == "identical":
        return [(0, rows)]
    if kind == "distinct":
        return [(i % slots, 1) for i in range(rows)]
    if kind == "uniform":
        return [(i, rows // slots + (i < rows % slots)) for i in range(slots)]
    shares = 1.5 ** -np.arange(slots)
    counts = np.diff(np.round(np.cumsum(shares) / shares.sum() * rows), prepend=0).astype(int)
    return list(enumerate(counts.tolist()))


def make_segments(
    layout: Sequence[tuple[int, int]], device: torch.device, block_m: int | None = None, num_tiles: int | None = None
) -> Segments:
    """In the families that the rule chooses, or all in that of ``block_m``."""
    slots = [slot for slot, _ in layout]
    starts = [0, *np.cumsum([rows for _, rows in layout]).tolist()]
    if block_m is not None:
        return Segments.build(starts, slots, tiles=(RowTiles.build(starts, slots, device, block_m, num_tiles),))
    all_rows = take_all_rows(starts, slots)
    tiles = build_tiles(starts, slots, device, all_rows=all_rows)
    return Segments.build(starts, slots, tiles=tiles, all_rows=all_rows)


def refill(tiles: RowTiles, starts: Sequence[int], slots: Sequence[int]) -> None:
    """Other segments' tiles in the same buffer, as a recorded step finds them."""
    tiles.entries.copy_(torch.from_numpy(cut_tiles(starts, slots, tiles.block_m, tiles.entries.shape[0])))


def expected(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    """y with the adapters added, in float64; y itself where nothing is added."""
    out = y.double()
    for i, slot in enumerate(segments.lora_indices):
        weights = group.slots[slot] if slot >= 0 else None
        rows = slice(*segments.seg_indptr[i : i + 2])
        if weights is None:
            continue
        column = 0
        for j, b in enumerate(weights.b):
            a = weights.a[column : column + weights.ranks[j]].double()
            column += weights.ranks[j]
            if b is not None:
                add = torch.einsum("ti,ri,or->to", x[rows].double(), a, b.double())
                out[rows, group.out_offsets[j] : group.out_offsets[j + 1]] += add
    return out


def check(add_lora: AddLora, group: LoraGroup, segments: Segments, like: Tensor) -> None:
    """Rows that get nothing hold NaN, before and after, as does all that surrounds the strided x and y."""
    rows, width = segments.seg_indptr[-1], group.out_offsets[-1]
    base = torch.ones(rows, dtype=torch.bool, device=like.device)
    for i, slot in enumerate(segments.lora_indices):
        if slot >= 0 and group.slots[slot] is not None:
            base[segments.seg_indptr[i] : segments.seg_indptr[i + 1]] = False
    canvas = like.new_full((rows + 2, width + 24), math.nan)
    x_canvas = like.new_full((rows + 2, group.in_features + 8), math.nan)
    y, x = canvas[1:-1, 16 : 16 + width], x_canvas[1:-1, 8:]
    y.copy_(torch.randn(rows, width, device=like.device)), x.copy_(torch.randn(x.shape, device=like.device))
    y[base], x[base] = math.nan, math.nan
    outside = torch.ones_like(canvas, dtype=torch.bool)
    outside[1:-1, 16 : 16 + width] = base[:, None]
    want = expected(y, x, group, segments)
    add_lora(y, x, group, segments)
    assert torch.isnan(canvas[outside]).all(), "something beside the rows with adapters was written"
    got, want = y[~base].double(), want[~base]
    assert torch.isfinite(got).all()
    if got.numel():
        scale = want.square().mean().sqrt()
        worst = float(((got - want).abs() / (want.abs() + scale)).max())
        assert worst <= TOLERANCE[like.dtype], f"off by {worst:.1e}"
