"""What FlashInfer is told of a step: its wrappers stand in as plain loops over the page tables that they are given."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import BLOCK, HEAD_DIM, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from punica_batch_kernels.attention import flashinfer_backend, reference
from punica_batch_kernels.attention.flashinfer_backend import FlashInferAttention, PageTable
from punica_batch_kernels.attention.types import AttentionShape
from punica_batch_kernels.backend import REFERENCE, kernels_for
from torch import Tensor

CPU = torch.device("cpu")


class Wrapper:
    """FlashInfer's documented meaning, a key at a time: key j of a sequence is in page indices[indptr + j // size];
    query i of n stands at position length - n + i and sees the ``window_left`` keys before it."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        self.options = options
        self.plans = 0
        self._int_workspace_buffer = torch.empty(8)
        self._pin_memory_int_workspace_buffer = torch.empty(8)

    def keep(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *,
        sm_scale: float, window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        if self.options.get("use_cuda_graph"):
            assert len(indices) == 0  # what would be copied, and waited for
            indices = self.fixed("indices")[: indptr[-1]]
            assert len(self.fixed("last_page_len")) == len(last_page_len)
        for numbers in (qo_indptr, indptr, indices, last_page_len):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert len(indptr) == len(qo_indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        self.qo_indptr, self.indptr, self.indices, self.last = qo_indptr, indptr, indices, last_page_len
        self.shape = num_qo_heads, num_kv_heads, head_dim
        self.page_size, self.scale, self.window_left = page_size, sm_scale, window_left
        self.plans += 1

    def fixed(self, name: str) -> Tensor:
        return next(v for k, v in self.options.items() if k.startswith(f"paged_kv_{name}_buf"))

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor, k_scale: float) -> None:
        assert (q.shape[1], cache[0].shape[2], q.shape[2]) == self.shape
        assert cache[0].shape[1] == self.page_size
        assert len(q) == len(out) == self.qo_indptr[-1]
        for s in range(len(self.last)):
            pages = self.indices[self.indptr[s] : self.indptr[s + 1]].long()
            length = (len(pages) - 1) * self.page_size + int(self.last[s])
            k, v = (c[pages].flatten(0, 1)[:length].double() for c in cache)
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            rows = range(int(self.qo_indptr[s]), int(self.qo_indptr[s + 1]))
            for i, row in enumerate(rows):
                stop = length - len(rows) + i + 1
                start = 0 if self.window_left < 0 else max(0, stop - 1 - self.window_left)
                logits = torch.einsum("hd,khd->hk", q[row].double(), k[start:stop]) * self.scale * k_scale
                out[row] = torch.einsum("hk,khd->hd", logits.softmax(-1), v[start:stop]).to(out.dtype)


class Prefill(Wrapper):
    def plan(self, *args: Any, causal: bool, **options: Any) -> None:
        assert causal
        self.keep(*args, **options)


class Decode(Wrapper):
    def plan(self, indptr: Tensor, *args: Any, **options: Any) -> None:
        self.keep(torch.arange(len(indptr), dtype=torch.int32), indptr, *args, **options)


def attention(heads: int, kv_heads: int, *windows: int | None, fastest: str = "fa3") -> FlashInferAttention:
    shape = AttentionShape(heads, kv_heads, HEAD_DIM, frozenset(windows))
    with pytest.MonkeyPatch.context() as patch:
        fake = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Prefill, BatchDecodeWithPagedKVCacheWrapper=Decode)
        patch.setitem(sys.modules, "flashinfer", fake)
        patch.setattr(flashinfer_backend, "prefill_backend", lambda device, dtype: fastest)
        patch.setattr(flashinfer_backend, "workspace_bytes", lambda shape, num_sms: 16)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
        return FlashInferAttention(shape, torch.float32, CPU)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sequences", "tiles", "tile"),
    [
        (32, 1, 1, 264, 128),  # two blocks for each of 132 multiprocessors
        (64, 8, 64, 33, 128),  # 256 rows of 18 sequences: 8 * 256 / 128 + 17
        (96, 8, 64, 41, 128),
        (32, 4, 1024, 1535, 16),  # 1024 * 8 / 16, and a tile that is not full for each but the first
        (32, 2, 1024, 2047, 16),
        (71, 1, 256, 397, 128),  # of 71 into no 64 rows: 256 * 71 / 128 + 255
        (96, 4, 1024, 1407, 64),  # a group of 24 does not fit into 16 rows: 1024 * 24 / 64 + 1023
    ],
)
def test_workspace_holds_what_flashinfer_sets_aside(
    heads: int, kv_heads: int, sequences: int, tiles: int, tile: int
) -> None:
    """float32 values and a log-sum-exp for each row of each tile, as its scheduler.cuh counts in graphs."""
    shape = AttentionShape(heads, kv_heads, 128, max_num_seqs=sequences)
    needed = heads * tiles * tile * 129 * 4
    assert flashinfer_backend.workspace_bytes(shape, num_sms=132) == max(needed, 256 << 20)


BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49)
MIXES = {
    "decode": [(1, n) for n in BORDERS],
    "prefill": [(n, n) for n in BORDERS[1:]],
    "chunked": [(5, n) for n in BORDERS if n > 5],
    "mixed": [*((n, n) for n in BORDERS[1:]), *((5, n) for n in BORDERS if n > 5), *((1, n) for n in BORDERS)],
}


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 1000])
@pytest.mark.parametrize("mix", MIXES)
def test_block_borders(mix: str, window: int | None) -> None:
    Case(MIXES[mix], 6, 2).check(window, paged_attention=attention(6, 2, window).run)


lengths = st.integers(1, 70).flatmap(lambda kv: st.tuples(st.integers(1, kv), st.just(kv)))


@given(st.lists(lengths, min_size=1, max_size=8), st.one_of(st.none(), st.integers(1, 80)), st.integers(0, 99))
@settings(max_examples=25)
def test_any_step(lengths: list[tuple[int, int]], window: int | None, seed: int) -> None:
    Case(lengths, 4, 2, seed=seed).check(window, paged_attention=attention(4, 2, window).run)


def test_a_plan_serves_all_layers_and_each_window_has_its_own() -> None:
    """Planned before the first layer, both kinds at once, then used in turn."""
    case = Case(MIXES["mixed"], 4, 2)
    backend = attention(4, 2, None, 5)
    plans = {w: backend.plan(case.meta, BLOCK, window=w) for w in (None, 5)}
    for window in (None, 5, None, 5):
        got = backend.run(case.q, case.k_cache, case.v_cache, case.meta, scale=0.3, window=window, plan=plans[window])
        torch.testing.assert_close(got.double(), case.expected(0.3, window), atol=2e-6, rtol=1e-5)
    assert all(w._any.plans == 2 for pair in backend._wrappers.values() for w in pair)  # at the start, and now


def test_steps_of_a_shape_that_recurs_have_wrappers_of_their_own() -> None:
    """The same one for each step of a shape, reading the same buffers; plans' pinned buffers take turns."""
    backend, wrappers, pinned = attention(4, 2, None), [], []
    for lengths in ([(5, 20), (3, 3), (1, 9)], [(2, 40), (6, 17), (1, 3)], [(4, 4), (4, 4), (1, 1), (1, 2)]):
        case = Case(lengths, 4, 2)
        meta = replace(case.meta, capacity=64)
        plan = backend.plan(meta, BLOCK, window=None)
        got = backend.run(case.q, case.k_cache, case.v_cache, meta, scale=0.3, window=None, plan=plan)
        torch.testing.assert_close(got.double(), case.expected(0.3, None), atol=2e-6, rtol=1e-5)
        wrappers.append((plan.prefill, plan.decode))
        pinned.append(plan.decode._pin_memory_int_workspace_buffer.data_ptr())
    assert wrappers[0] == wrappers[1]
    assert wrappers[1][0] is wrappers[2][0]
    assert wrappers[1][1] is not wrappers[2][1]
    assert pinned[0] == pinned[2] != pinned[1]
    shared = {(w.fixed("indices").data_ptr(), w._int_workspace_buffer.data_ptr()) for _, w in wrappers}
    assert len(shared) == 1


def test_an_engine_after_another_has_page_tables_of_its_own_size() -> None:
    """The same kernels serve the next engine, whose cache has another number of blocks."""
    backend, case = attention(4, 2, None), Case([(5, 20), (3, 3), (1, 9)], 4, 2)
    for capacity in (64, 96, 64):
        meta = replace(case.meta, capacity=capacity)
        plan = backend.plan(meta, BLOCK, window=None)
        assert len(plan.decode.fixed("indices")) == len(plan.prefill.fixed("indices")) == capacity
        got = backend.run(case.q, case.k_cache, case.v_cache, meta, scale=0.3, window=None, plan=plan)
        torch.testing.assert_close(got.double(), case.expected(0.3, None), atol=2e-6, rtol=1e-5)


def test_prefill_kernels_that_cannot_be_made_give_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, asked = Prefill.plan, list[str]()

    def plan(self: Prefill, *args: Any, **options: Any) -> None:
        asked.append(self.options["backend"])
        if asked[-1] == "fa3":
            raise RuntimeError("nvcc: unsupported architecture")
        keep(self, *args, **options)

    monkeypatch.setattr(Prefill, "plan", plan)
    backend = attention(4, 2, None)
    assert asked == ["fa3", "fa2"]
    Case(MIXES["mixed"], 4, 2).check(None, paged_attention=backend.run)
    monkeypatch.setattr(Prefill, "plan", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention(4, 2, None, fastest="fa2")


def test_recorded_prefills_are_fa2s() -> None:
    """Whatever is the fastest otherwise: it plans for any number of rows."""
    backend, case = attention(4, 2, None), Case([(5, 20), (3, 3)], 4, 2)
    plans = [backend.plan(replace(case.meta, capacity=c), BLOCK, window=None) for c in (None, 64)]
    assert [plan.prefill.options["backend"] for plan in plans] == ["fa3", "fa2"]


def test_page_table() -> None:
    tables = np.array([[7, 3, 0], [4, 5, 6], [9, 0, 0]], np.int32)
    pages = PageTable.build(tables, np.array([17, 48, 16]), 16)
    assert pages.indptr.tolist() == [0, 2, 5, 6]
    assert pages.indices.tolist() == [7, 3, 4, 5, 6, 9]
    assert pages.last_page_len.tolist() == [1, 16, 16]


def test_what_flashinfer_cannot_do_is_said() -> None:
    half, shape = torch.float16, AttentionShape(32, 8, 128)
    assert flashinfer_backend.unsupported(shape, half, half) is None
    assert "float32" in str(flashinfer_backend.unsupported(shape, torch.float32, torch.float32))
    assert "KV cache" in str(flashinfer_backend.unsupported(shape, half, torch.float32))
    assert "size 80" in str(flashinfer_backend.unsupported(AttentionShape(32, 32, 80), half, half))


def test_backends_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch on the CPU; on CUDA, where FlashInfer fails, torch's attention beside Triton's SGMV, and a note."""
    shape = AttentionShape(4, 2, 64)
    assert kernels_for(CPU, torch.float32, shape) is REFERENCE
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed
    kernels = kernels_for(torch.device("cuda"), torch.float16, shape)
    assert kernels.paged_attention is reference.paged_attention
    assert kernels.add_lora is not REFERENCE.add_lora
    assert "ModuleNotFoundError" in str(kernels.note)
    assert kernels.fused is not None
    other_cache = kernels_for(torch.device("cuda"), torch.float16, shape, torch.bfloat16)
    assert other_cache.fused is None, "they write keys and values as they have them"
