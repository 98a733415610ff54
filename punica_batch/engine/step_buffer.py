"""A step's numbers on the device: one buffer that every step fills by one copy, and the last tokens that stay there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from punica_batch_kernels.sgmv.tiles import RowTiles
from torch import Tensor

# (``block_m``, entries int32 [N, 4]) of each kernel family: ``RowTiles`` on the host
Tiles = list[tuple[int, NDArray[np.int32]]]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Views of the step buffer: the same places for each step with as many rows and tiles (``logits_rows`` and
    ``seats`` lie behind all else, for a shape leaves open how many are sampled).

    ``known`` int64 [seats + T]: the last token of each seat, then the tokens that the host knows; ``token_index`` int64
    [T]: each row's token among them. ``positions``, ``slot_mapping`` int64 [T]; ``logits_rows`` int64 [R]: the rows to
    sample from; ``seats`` int64 [R]: whose tokens those will be. ``tiles``: those of the step's kernel families.
    """

    known: Tensor
    token_index: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_rows: Tensor
    seats: Tensor
    tiles: tuple[RowTiles, ...]

    def input_ids(self) -> Tensor:
        """int64 [T], put together on the device."""
        return self.known.index_select(0, self.token_index)


class StepBuffer:
    """For steps of at most ``max_tokens`` rows, on behalf of ``num_seats`` sequences.

    Filling it is ordered with the steps' kernels on the current stream: a step's numbers may be sent while the one
    before still runs.
    """

    def __init__(self, num_seats: int, max_tokens: int, device: torch.device) -> None:
        self._num_seats = num_seats
        # numbers of rows and of samples; and tiles, of two words each, which may all be of one row, in two families
        # filled up to twice as many
        words = num_seats + (6 + 2 * 2 * 2) * (max_tokens + num_seats)
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self.last_tokens = self._words[:num_seats]

    def send(
        self,
        input_ids: NDArray[np.int64],
        row_seats: NDArray[np.int64],
        positions: NDArray[np.int64],
        slot_mapping: NDArray[np.int64],
        logits_rows: NDArray[np.int64],
        seats: NDArray[np.int64],
        tiles: Tiles,
    ) -> StepInputs:
        """``row_seats`` int64 [T]: the seat whose last token is the row's, -1 where ``input_ids`` has it.

        The rest: ``StepInputs``. Nothing waits for the copy.
        """
        first, rows = self._num_seats, len(input_ids)
        token_index = np.where(row_seats >= 0, row_seats, first + np.arange(rows))
        parts: list[NDArray[Any]] = [input_ids, token_index, positions, slot_mapping]
        parts += [np.ascontiguousarray(entries).reshape(-1).view(np.int64) for _, entries in tiles]
        parts += [logits_rows, seats]
        words = np.concatenate(parts)
        # from a cache of pinned blocks, which keeps this one until the copy has run
        host = torch.empty(len(words), dtype=torch.int64, pin_memory=self._words.is_cuda)
        host.numpy()[:] = words
        filled = self._words[first : first + len(words)]
        filled.copy_(host, non_blocking=True)
        views = filled.split_with_sizes([len(part) for part in parts])
        families = [
            RowTiles(view.view(torch.int32).view(-1, 4), block_m)
            for (block_m, _), view in zip(tiles, views[4:-2], strict=True)
        ]
        return StepInputs(
            known=self._words[: first + rows], token_index=views[1], positions=views[2], slot_mapping=views[3],
            logits_rows=views[-2], seats=views[-1], tiles=tuple(families),
        )  # fmt: skip
