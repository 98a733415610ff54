"""Where each slot's weights lie, as the device kernels look it up: addresses and ranks, group by group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from punica_batch_kernels.sgmv.types import MAX_SLICES, LoraGroup, SlotTable, SlotWeights

_COLUMNS = 2 + 2 * MAX_SLICES
# Kernels load 16 bytes at a time.
_ALIGNMENT = 16


class SlotTables:
    """The tables of all groups of a model, in one device tensor: int64 [slots, groups, 2 + 2 x ``MAX_SLICES``].

    A slot's row of a group: its rank sum, the address of A, then a pair a slice: the address of B (stored rank by
    rank, [rank, width]), and the slice's rank + 2**32 x its first column in v. All 0 where the slot adds nothing.

    Making one gives every group its ``table``; ``install`` follows each change of ``group.slots[slot]``. ``max_rank``
    is the largest rank of any slice of any adapter that will ever be installed: grids and buffers are sized by it.
    """

    def __init__(
        self, groups: Sequence[LoraGroup], max_rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._groups = list(groups)
        self._max_rank = max_rank
        self._dtype = dtype
        num_slots = len(self._groups[0].slots)
        self.entries = torch.zeros(num_slots, len(self._groups), _COLUMNS, dtype=torch.int64, device=device)
        for i, group in enumerate(self._groups):
            group.table = SlotTable(self.entries[:, i], max_rank, dtype)
        for slot in range(num_slots):
            self.install(slot)

    def rows(self, weights: Sequence[SlotWeights | None]) -> Tensor:
        """What ``install`` writes for an adapter's ``weights``, one a group: may be made ahead, on any thread.

        Raises ``ValueError`` for weights that the kernels cannot address: another dtype, a rank above ``max_rank``, a
        matrix that is not contiguous as described or not aligned to 16 bytes.
        """
        rows = torch.tensor([self._row(w) for w in weights], dtype=torch.int64)
        # pinned memory from a cache that keeps the block until the copy has run
        return rows.pin_memory() if self.entries.is_cuda else rows

    def install(self, slot: int, rows: Tensor | None = None) -> None:
        """Writes what the groups now hold in ``slot``, or ``rows`` of it, by a copy on the current stream; nothing
        waits for it. Raises as ``rows`` does, and then writes nothing."""
        if rows is None:
            rows = self.rows([group.slots[slot] for group in self._groups])
        self.entries[slot].copy_(rows, non_blocking=True)

    def _row(self, weights: SlotWeights | None) -> list[int]:
        row = [0] * _COLUMNS
        if weights is None:
            return row
        if max(weights.ranks) > self._max_rank:
            raise ValueError(f"rank {max(weights.ranks)} is above the tables' maximum of {self._max_rank}")
        row[:2] = sum(weights.ranks), self._address(weights.a)
        column = 0
        for i, (b, rank) in enumerate(zip(weights.b_t, weights.ranks, strict=True)):
            row[2 + 2 * i] = 0 if b is None else self._address(b)
            row[3 + 2 * i] = rank + (column << 32)
            column += rank
        return row

    def _address(self, matrix: Tensor) -> int:
        if matrix.dtype != self._dtype:
            raise ValueError(f"adapter weights are {matrix.dtype}, the tables' are {self._dtype}")
        if not matrix.is_contiguous() or matrix.data_ptr() % _ALIGNMENT:
            raise ValueError("A [rank, in] and B's transpose [rank, out] must be contiguous and aligned to 16 bytes")
        return matrix.data_ptr()
