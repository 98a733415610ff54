"""Where each slot's weights lie, as the device kernels look it up: addresses and ranks, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from punica_batch_kernels.sgmv.types import MAX_SLICES, LoraGroup, SlotTable, SlotWeights

_COLUMNS = 2 + 2 * MAX_SLICES
# Kernels load 16 bytes at a time.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where an adapter's matrices of one group lie in its packed buffer, in elements from its start.

    ``b``: one a slice, None where its rank in ``ranks`` is 0. A is [sum of ranks, in], each B [rank, width].
    """

    a: int
    b: tuple[int | None, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowTemplate:
    """A slot's rows but for where the buffer begins; the same for all adapters of one layout."""

    numbers: NDArray[np.int64]
    is_address: NDArray[np.int64]

    def at(self, address: int, *, pinned: bool) -> Tensor:
        """The rows of an adapter whose buffer begins at ``address``, as ``SlotTables.install`` takes them.

        Raises ``ValueError`` unless it is a multiple of 16.
        """
        if address % _ALIGNMENT:
            raise ValueError(f"an adapter's buffer must be aligned to {_ALIGNMENT} bytes")
        rows = torch.from_numpy(self.numbers + self.is_address * address)
        # pinned memory from a cache that keeps the block until the copy has run
        return rows.pin_memory() if pinned else rows


class SlotTables:
    """The tables of all groups of a model, in one device tensor: int64 [slots, groups, 2 + 2 x ``MAX_SLICES``].

    A slot's row of a group: its rank sum, the address of A, then a pair a slice: the address of B (stored rank by
    rank, [rank, width]), and the slice's rank + 2**32 x its first column in v. All 0 where the slot adds nothing.

    Making one gives every group its ``table``; ``install`` follows each change of ``group.slots[slot]``. ``max_rank``
    is the largest rank of any slice of any adapter that will ever be installed: v is sized by it.
    """

    def __init__(
        self, groups: Sequence[LoraGroup], max_rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._groups = list(groups)
        self._max_rank = max_rank
        self._dtype = dtype
        num_slots = len(self._groups[0].slots)
        # the row before the first is that of slot -1, which adds nothing
        rows = torch.zeros(1 + num_slots, len(self._groups), _COLUMNS, dtype=torch.int64, device=device)
        self.entries = rows[1:]
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

    def template(self, layouts: Sequence[GroupLayout | None]) -> RowTemplate:
        """What ``rows`` says of adapters of this layout, one entry a group, but for their buffers' addresses.

        Raises ``ValueError`` as ``rows`` does.
        """
        numbers = np.zeros((len(layouts), _COLUMNS), np.int64)
        is_address = np.zeros_like(numbers)
        for i, layout in enumerate(layouts):
            if layout is None:
                continue
            offsets = (layout.a, *layout.b)
            if any((offset or 0) * self._dtype.itemsize % _ALIGNMENT for offset in offsets):
                raise ValueError(f"matrices must be aligned to {_ALIGNMENT} bytes")
            places = [None if offset is None else offset * self._dtype.itemsize for offset in offsets]
            numbers[i] = self._numbers(layout.ranks, places)
            is_address[i, 1] = 1
            is_address[i, 2 : 2 + 2 * len(layout.b) : 2] = [b is not None for b in layout.b]
        return RowTemplate(numbers, is_address)

    def install(self, slot: int, rows: Tensor | None = None) -> None:
        """Writes what the groups now hold in ``slot``, or ``rows`` of it, by a copy on the current stream; nothing
        waits for it. Raises as ``rows`` does, and then writes nothing."""
        if rows is None:
            rows = self.rows([group.slots[slot] for group in self._groups])
        self.entries[slot].copy_(rows, non_blocking=True)

    def _row(self, weights: SlotWeights | None) -> list[int]:
        if weights is None:
            return [0] * _COLUMNS
        return self._numbers(
            weights.ranks, [None if m is None else self._address(m) for m in (weights.a, *weights.b_t)]
        )

    def _numbers(self, ranks: Sequence[int], places: Sequence[int | None]) -> list[int]:
        """A row from the slices' ranks and the places of A and of each B."""
        if max(ranks) > self._max_rank:
            raise ValueError(f"rank {max(ranks)} is above the tables' maximum of {self._max_rank}")
        row = [0] * _COLUMNS
        row[0] = sum(ranks)
        row[1] = places[0] or 0
        column = 0
        for i, (place, rank) in enumerate(zip(places[1:], ranks, strict=True)):
            row[2 + 2 * i] = place or 0
            row[3 + 2 * i] = rank + (column << 32)
            column += rank
        return row

    def _address(self, matrix: Tensor) -> int:
        if matrix.dtype != self._dtype:
            raise ValueError(f"adapter weights are {matrix.dtype}, the tables' are {self._dtype}")
        if not matrix.is_contiguous() or matrix.data_ptr() % _ALIGNMENT:
            raise ValueError("A [rank, in] and B's transpose [rank, out] must be contiguous and aligned to 16 bytes")
        return matrix.data_ptr()
