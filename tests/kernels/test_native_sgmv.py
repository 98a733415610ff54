"""The C kernel against float64: ranks, segment lengths, slices, strides; the same result on any number of threads."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from punica_batch_kernels.native.kernels import NativeKernels
from punica_batch_kernels.native.sgmv import NativeSgmv
from punica_batch_kernels.sgmv import reference
from punica_batch_kernels.sgmv.types import LoraGroup, Segments, SlotWeights
from torch import Tensor


@pytest.fixture(scope="module")
def sgmv(native_kernels: NativeKernels) -> NativeSgmv:
    return native_kernels.sgmv


def weights(widths: list[int], h_in: int, ranks: list[int], generator: torch.Generator) -> SlotWeights:
    """B lies rank by rank, as the engine packs it."""
    b = [torch.randn(r, w, generator=generator).t() if r else None for r, w in zip(ranks, widths, strict=True)]
    return SlotWeights(torch.randn(sum(ranks), h_in, generator=generator), tuple(b), tuple(ranks))


def expected(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> Tensor:
    out = y.double()
    spans = zip(pairwise(segments.seg_indptr), segments.lora_indices, strict=True)
    for (start, stop), slot in spans:
        adapter = group.slots[slot] if slot >= 0 else None
        if adapter is None:
            continue
        v = x[start:stop].double() @ adapter.a.double().t()
        first = 0
        for (left, right), rank, b in zip(pairwise(group.out_offsets), adapter.ranks, adapter.b, strict=True):
            if b is not None:
                out[start:stop, left:right] += v[:, first : first + rank] @ b.double().t()
            first += rank
    return out


@given(st.data())
def test_any_segments_of_any_ranks(sgmv: NativeSgmv, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    widths = data.draw(st.lists(st.sampled_from([1, 7, 64, 65, 100, 192]), min_size=1, max_size=3))
    h_in = data.draw(st.sampled_from([1, 15, 16, 17, 64, 100, 576]))
    ranks = st.sampled_from([0, 1, 2, 3, 5, 8, 12, 16, 33, 64, 128, 256])
    group = LoraGroup(h_in, tuple(accumulate(widths, initial=0)))
    for _ in range(4):
        drawn = data.draw(st.lists(ranks, min_size=len(widths), max_size=len(widths)))
        group.slots.append(weights(widths, h_in, drawn, generator) if any(drawn) else None)
    lengths = data.draw(st.lists(st.one_of(st.integers(0, 12), st.integers(30, 70)), min_size=1, max_size=6))
    slots = data.draw(st.lists(st.integers(-1, 3), min_size=len(lengths), max_size=len(lengths)))
    segments = Segments.build(list(accumulate(lengths, initial=0)), slots)
    rows = sum(lengths)
    x = torch.randn(rows, h_in + 3, generator=generator)[:, :h_in]
    wide = torch.full((rows, sum(widths) + 5), float("nan"))
    y = wide[:, 2 : 2 + sum(widths)].copy_(torch.randn(rows, sum(widths), generator=generator))
    want = expected(y, x, group, segments)
    sgmv.add_lora(y, x, group, segments)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4 * (h_in**0.5))
    assert wide[:, :2].isnan().all()
    assert wide[:, 2 + sum(widths) :].isnan().all()


def decode_step(generator: torch.Generator) -> tuple[LoraGroup, Segments, Tensor, Tensor]:
    group = LoraGroup(576, (0, 576, 768, 960))
    group.slots = [weights([576, 192, 192], 576, [r] * 3, generator) for r in (8, 64, 16, 32)]
    segments = Segments.build([0, 8, 20, 21, 29, 33], [0, 1, -1, 2, 3])
    return group, segments, torch.randn(33, 576, generator=generator), torch.randn(33, 960, generator=generator)


def test_the_result_does_not_depend_on_threads(sgmv: NativeSgmv, two_threads: None) -> None:
    group, segments, x, y = decode_step(torch.Generator().manual_seed(1))
    other = y.clone()
    sgmv.add_lora(y, x, group, segments)
    torch.set_num_threads(1)
    sgmv.add_lora(other, x, group, segments)
    assert torch.equal(y, other)


def test_the_kernel_is_what_runs(sgmv: NativeSgmv, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("the reference ran")

    group, segments, x, y = decode_step(torch.Generator().manual_seed(2))
    monkeypatch.setattr(reference, "add_lora", refused)
    sgmv.add_lora(y, x, group, segments)
    with pytest.raises(AssertionError):  # half precision is the reference's
        sgmv.add_lora(y.half(), x.half(), group, segments)


def test_a_rows_result_depends_on_nothing_else(sgmv: NativeSgmv) -> None:
    """Bit for bit: in a long segment among others, and alone."""
    generator = torch.Generator().manual_seed(3)
    group = LoraGroup(576, (0, 576, 768, 960))
    group.slots = [weights([576, 192, 192], 576, [r] * 3, generator) for r in (8, 64)]
    x, y = torch.randn(60, 576, generator=generator), torch.randn(60, 960, generator=generator)
    alone = y[37:38].clone()
    sgmv.add_lora(y, x, group, Segments.build([0, 9, 60], [0, 1]))
    sgmv.add_lora(alone, x[37:38], group, Segments.build([0, 1], [1]))
    assert torch.equal(y[37:38], alone)
