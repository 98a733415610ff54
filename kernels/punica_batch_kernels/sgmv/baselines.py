"""What SGMV is measured against in plain torch, as in the Punica paper's section 7.2: a loop, and gather-BMM.

Both take any device, write into ``y`` as ``reference.add_lora`` does, and may wait for the device or the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments


def loop(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> None:
    """Two matrix products a segment and slice, one after the other."""
    reference.add_lora(y, x, group, segments)


class GatherBmm:
    """Each row's weights gathered, then two batched products over single rows: what frameworks without SGMV can do.

    The gather copies an adapter's weights once a row. Adapters are padded with zeros to the group's largest rank, and
    stacked once, when this is made: ``group``'s slots must not change after that. Slot -1 adds zeros.
    """

    def __init__(self, group: LoraGroup) -> None:
        present = [weights for weights in group.slots if weights is not None]
        if not present:
            raise ValueError("the group holds no adapter: install one before stacking them")
        rank = max(max(weights.ranks) for weights in present)
        like, slots, widths = present[0].a, len(group.slots), group.out_widths
        self._offsets = group.out_offsets
        self._a = like.new_zeros(slots + 1, len(widths) * rank, group.in_features)
        self._b = [like.new_zeros(slots + 1, rank, width) for width in widths]
        for slot, weights in enumerate(group.slots):
            if weights is None:
                continue
            rows = weights.a.split_with_sizes(weights.ranks)
            for i, (a, b) in enumerate(zip(rows, weights.b_t, strict=True)):
                self._a[slot, i * rank : i * rank + a.shape[0]] = a
                if b is not None:
                    self._b[i][slot, : b.shape[0]] = b

    def __call__(self, y: Tensor, x: Tensor, segments: Segments) -> None:
        """y += (x A.T) B.T; ``x`` [T, in_features], ``y`` [T, out_offsets[-1]]."""
        self.add(y, x, row_slots(segments).to(x.device))

    def add(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """The same for ``row_slots`` that are on the device: nothing waits, so a graph may capture it."""
        v = torch.bmm(self._a[slots], x[:, :, None])[:, :, 0]
        for i, part in enumerate(v.chunk(len(self._b), dim=1)):
            y[:, self._offsets[i] : self._offsets[i + 1]] += torch.bmm(part[:, None], self._b[i][slots])[:, 0]


def row_slots(segments: Segments) -> Tensor:
    """Each row's slot, int64 [T], on the CPU."""
    return torch.tensor(segments.lora_indices).repeat_interleave(torch.tensor(segments.lengths))
