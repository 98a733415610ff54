"""The engine's benchmarks: timelines from made-up kernels, and a run of each command."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
from punica_batch import cli
from punica_batch.bench import engine as engine_bench
from punica_batch.bench import overhead
from punica_batch.bench import workbench as workbench_module
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.selection import MIXED_RANKS, Selection, parse_ranks
from punica_batch.bench.serving import SETTLE_STEPS, Rows, drop, serve, start, steps_to_prefill
from punica_batch.bench.timeline import (
    DeviceEvent,
    Timeline,
    busy_seconds,
    decode_timeline,
    kind_of,
    mixed_timeline,
    require_alike,
)
from punica_batch.bench.workbench import FOLDERS, Workbench, workbench
from punica_batch.engine.engine import Engine
from punica_batch.errors import JobError, UsageError
from punica_batch.models.llama import LlamaModel
from punica_batch.models.weights import random_weights
from punica_batch.types import JsonDict

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with workbench("tiny", dtype="float32", device=CPU, ranks=(2, 4)) as made:
        yield made


def options(results: Path) -> BenchOptions:
    return BenchOptions(model_shape="tiny", dtype="float32", rank=4, device="cpu", results=results)


def lines(results: Path, name: str) -> list[JsonDict]:
    return [json.loads(line) for line in (results / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_shrink_kernel", "add-on"),
        ("expand_silu_kernel", "add-on"),
        ("expand_rope_kernel", "add-on"),
        ("few_rows_kernel", "products"),
        ("rope_and_write_kv_kernel", "norms, rotation, activation"),
        ("repack_kernel", "copies"),
        ("argmax_split_kernel", "sampling"),
        ("argmax_join_kernel", "sampling"),
        ("draw_kernel", "sampling"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)1, "
         "(flashinfer::PosEncodingMode)0, flashinfer::DefaultAttention<false, false, false, false>>>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, __half, __half>", "attention"),
        ("void flashinfer::AppendPagedKVCacheKernel<128u, 8u, int, __half>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<flashinfer::PosEncodingMode>", "attention"),
        ("void flashinfer::PrefillWithKVCacheKernel<cutlass::Kernel>", "attention"),
        ("nvjet_hsh_192x8_64x8_2x1_v_bz_TNN", "products"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNN", "products"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel", "products"),
        ("void gemvNSP_kernel<__half, __half, __half, float, 1, 32, 4, 1024>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel", "sampling"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __half>", "norms, rotation, activation"),
        ("void flashinfer::norm::RMSNormKernel<8u, __half>", "norms, rotation, activation"),
        ("void flashinfer::activation::act_and_mul_kernel<__half>", "norms, rotation, activation"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_in_which_anything_runs() -> None:
    """Kernels side by side count once, one inside another not at all, gaps not."""
    spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]
    assert busy_seconds(DeviceEvent("k", a, b) for a, b in spans) == pytest.approx(4.0)
    timeline = Timeline({}, busy=4.0, wall=5.0, kernels=4, rows=1, tokens=1)
    assert (timeline.gaps, timeline.host_share) == (pytest.approx(1.0), pytest.approx(0.2))
    slowed = Timeline({}, busy=5.5, wall=5.0, kernels=4, rows=1, tokens=1)
    assert (slowed.gaps, slowed.host_share) == (0.0, 0.0)


def test_only_steps_that_are_alike_are_compared() -> None:
    require_alike(300.0, 310.0, slack=12.0)
    with pytest.raises(JobError, match=r"300 tokens.*320"):
        require_alike(300.0, 320.0, slack=12.0)


def test_a_load_through_the_engine(bench: Workbench) -> None:
    """Every row gets its tokens, the warm-up's adapters are not the load's, counts are this load's alone."""
    specs = bench.specs("a", 3) | bench.specs("b", 3)
    engine = bench.engine(cap=2, longest=40, adapters=specs, distinct=3)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 512, n).astype(np.int32) for n in (5, 9, 3)]
    for name in ("a", "b"):
        steps = engine.stats().steps
        served = serve(engine, Rows(prompts, [4, 2, 6], [f"{name}-{i}" for i in range(3)]))
        assert (served.rows, served.new_tokens, served.adapters_loaded, served.preemptions) == (3, 12, 3, 0)
        assert len(served.step_seconds) == len(served.mixed) == engine.stats().steps - steps
        assert 1 <= served.mixed.sum() < len(served.mixed)
        assert served.step_seconds.sum() <= served.seconds
    engine.check_integrity()
    with pytest.raises(JobError, match="row 0"):
        serve(engine, Rows(prompts[:1], [4], ["nobody"]))
    engine.close()


def test_steady_steps_and_their_end(bench: Workbench) -> None:
    engine = bench.engine(cap=3, longest=120, adapters=bench.specs("a", 3), distinct=3)
    rows = Rows([np.arange(3, 8 + n, dtype=np.int32) for n in range(3)], [60] * 3, ["a-0", "a-1", "a-2"])
    start(engine, rows)
    assert engine.stats().running == 3
    before = engine.stats()
    for _ in range(5):
        engine.step()
    after = engine.stats()
    assert after.prompt_tokens == before.prompt_tokens
    assert after.generated_tokens - before.generated_tokens == 15
    drop(engine, 3)
    assert not engine.has_work
    before = engine.stats()
    mixed = mixed_timeline(engine, rows, 4)
    assert mixed.wall > 0
    assert (mixed.rows, mixed.tokens) == (2, 2 + len(rows.prompts[2]) + 1)
    prompts = engine.stats().prompt_tokens - before.prompt_tokens
    assert prompts == len(rows.prompts[0]) + len(rows.prompts[1]) + (SETTLE_STEPS + 4) * len(rows.prompts[2])
    assert not engine.has_work
    decode = decode_timeline(engine, rows, 4)
    assert (decode.rows, decode.tokens, decode.host_share) == (3, 3, 0.0)
    engine.close()


def test_rows_that_end_too_early_have_no_timeline(bench: Workbench) -> None:
    """Nor do they stay behind."""
    engine = bench.engine(cap=3, longest=120, adapters={}, distinct=1)
    rows = Rows([np.arange(3, 8, dtype=np.int32)] * 3, [60, 60, 12], [None] * 3)
    with pytest.raises(JobError, match="2 rows ran where 3"):
        decode_timeline(engine, rows, 8)
    assert not engine.has_work
    engine.close()


def test_a_timelines_rows_are_half_way_in_its_middle() -> None:
    rows = Rows.of("chat", 256, 32000, [None] * 256)
    half_way = engine_bench._half_way(rows, 8192)
    [new] = set(half_way.new)
    [prompt] = {len(prompt) for prompt in half_way.prompts}
    assert prompt + new // 2 == 512 + 64
    assert half_way.longest <= rows.longest
    measured = 2 * SETTLE_STEPS + 2 * engine_bench._TIMELINE_STEPS
    assert new >= steps_to_prefill(256 * prompt, 256, 8192) + measured


def test_adapters_on_disk_have_the_ranks_in_turn(bench: Workbench) -> None:
    assert [bench.adapter_bytes(i) for i in range(4)] == [bench.bytes_of_rank(rank) for rank in (2, 4, 2, 4)]
    of_four = {spec.path for spec in bench.specs("x", 20, rank=4).values()}
    assert of_four == {str(folder) for folder in bench.folders[1::2]}
    assert len({spec.path for spec in bench.specs("x", 20).values()}) == FOLDERS
    file = bench.folders[1] / "adapter_model.safetensors"
    assert 0 <= file.stat().st_size - bench.adapter_bytes(1) < 20_000  # the header


def test_the_engine_command(tmp_path: Path) -> None:
    selection = Selection(
        loads=("decode", "label"), caps=(3,), adapters=("none", "distinct"), ranks=((2, 5),), share=0.01, longest=24
    )
    engine_bench.run(options(tmp_path), selection)
    written = lines(tmp_path, "engine")
    throughput = [line for line in written if line["what"] == "throughput"]
    assert [(x["parameters"]["load"], x["parameters"]["adapters"], x["unit"]) for x in throughput] == [
        ("decode", "none", "new tok/s"), ("label", "none", "rows/s"),
        ("decode", "distinct", "new tok/s"), ("label", "distinct", "rows/s"),
    ]  # fmt: skip
    for line in throughput:
        about = line["parameters"]
        assert about["rows"] == {"decode": 3, "label": 10}[about["load"]]
        assert about["ranks"] == "2+5"
        assert line["median"] > 0
        share = next(
            x["median"] for x in written
            if x["what"] == "share of the limit" and x["parameters"].items() >= {
                "load": about["load"], "adapters": about["adapters"], "of": "bytes and operations"
            }.items()
        )  # fmt: skip
        assert share == pytest.approx(100 * line["median"] / line["limit"], rel=1e-3)
    loaded = [x["parameters"]["adapters_loaded"] for x in written if x["what"] == "adapters loaded"]
    assert loaded == [0, 0, 3, 10]
    steps = [x["parameters"] for x in written if x["what"] == "timeline" and x["parameters"]["part"] == "all"]
    assert [(x["timeline"], x["rows"]) for x in steps] == [("decode", 3), ("mixed", 2)] * 2
    assert {x["what"] for x in written} >= {"copy bandwidth", "matrix product", "host link"}
    assert (tmp_path / "engine-tiny-float32-cpu.png").stat().st_size > 5000


def test_weights_other_than_the_default_are_named_in_each_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are those that the engine runs with, by the command line."""
    largest = []

    def norms(bench: Workbench, selection: Selection, cap: int) -> Engine:
        places = bench.model.named_tensors().items()
        largest.append(max(float(place.abs().max()) for name, place in places if name.endswith("norm.weight")))
        return engine(bench, selection, cap)

    engine = engine_bench._engine
    monkeypatch.setattr(engine_bench, "_engine", norms)
    chosen = ["--loads", "label", "--caps", "3", "--adapters", "none", "--results", str(tmp_path)]
    for weights in ([], ["--weights", "normal"], ["--weights", "vllm-dummy"]):
        tiny = ["--model-shape", "tiny", "--dtype", "float32", "--device", "cpu"]
        assert cli.execute(["bench", "engine", *tiny, *chosen, *weights]) == 0
    named: dict[str, set[str | None]] = {}
    for line in lines(tmp_path, "engine"):
        named.setdefault(line["run"], set()).add(line["parameters"].get("weights"))
    assert list(named.values()) == [{None}, {None}, {"vllm-dummy"}]
    assert largest[:2] == [1, 1]
    assert 0.0009 < largest[2] <= 0.001


def test_the_overhead_command(tmp_path: Path) -> None:
    overhead.run(options(tmp_path))
    written = lines(tmp_path, "overhead")
    points = {tuple(x["parameters"][k] for k in ("batch", "adapters", "rank_of_adapters")) for x in written}
    assert points == {(b, a, r) for b in (1, 3) for a in ("none", "identical", "distinct") for r in (2, 5)}
    for line in (x for x in written if x["what"] == "token latency"):
        about = line["parameters"]
        assert 0 < line["limit"] < about["p50"] <= about["p95"] <= about["p99"]
    assert (tmp_path / "overhead-tiny-float32-cpu.png").is_file()


def test_a_model_is_gone_before_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes much of a GPU's memory."""
    made: list[weakref.ref[LlamaModel]] = []

    def one_at_a_time(*arguments: Any, **options: Any) -> LlamaModel:
        gc.collect()
        assert not any(earlier() for earlier in made)
        model = random_weights(*arguments, **options)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(workbench_module, "random_weights", one_at_a_time)
    few = Selection(loads=("label",), caps=(3,), adapters=("none",), ranks=((2,), (4,)), share=0.01)
    engine_bench.run(options(tmp_path), few)
    assert len(made) == 2
    assert {x["parameters"].get("ranks") for x in lines(tmp_path, "engine")} == {None, "2", "4"}


def test_what_is_chosen_on_the_command_line() -> None:
    given = {
        "loads": None,
        "caps": None,
        "adapters": None,
        "ranks": ((16,),),
        "batched_tokens": None,
        "weights": "normal",
    }
    assert Selection().choose(**given) == Selection()
    chosen = Selection().choose(**given | {"loads": "chat", "caps": "8,64", "adapters": "none,distinct"})
    assert (chosen.loads, chosen.caps, chosen.adapters) == (("chat",), (8, 64), ("none", "distinct"))
    both = Selection().choose(**given | {"loads": "chat,label", "adapters": "none,distinct"})
    assert list(both.points()) == [("chat", "none"), ("label", "none"), ("chat", "distinct"), ("label", "distinct")]
    assert parse_ranks("8,mix") == ((8,), MIXED_RANKS)
    assert [Selection().rows(kind, cap) for kind, cap in (("decode", 32), ("chat", 64), ("label", 512))] == [
        256,
        512,
        1000,
    ]
    for wrong in ({"loads": "decoding"}, {"caps": "many"}, {"caps": "0"}, {"adapters": "zipf"}, {"weights": ""}):
        with pytest.raises(UsageError):
            Selection().choose(**given | wrong)
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks("8;16")
