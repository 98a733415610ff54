"""The kernel of products of few rows compiles for an A100 and an H100, and fits their shared memory; without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from aot import A100_SHARED_MEMORY, NEEDS_COMPILER, compile_for
from punica_batch_kernels.products import few_rows
from punica_batch_kernels.products.few_rows import FewRowsLinear
from punica_batch_kernels.products.few_rows_config import MEASURED, FewRowsConfig, choose_config
from punica_batch_kernels.products.few_rows_kernels import few_rows_kernel

pytestmark = NEEDS_COMPILER

H100_SHARED_MEMORY = 227 * 1024  # of one block

WEIGHTS_AS_M = FewRowsConfig(block_n=64, block_k=128, transposed=True, num_warps=4, num_stages=3, prefetch=512)
ROWS_AS_M = FewRowsConfig(block_n=32, block_k=128, transposed=False, num_warps=4, num_stages=4, prefetch=512)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("programs", [0, 132])
@pytest.mark.parametrize("config", [WEIGHTS_AS_M, ROWS_AS_M], ids=["weights as M", "rows as M"])
def test_compiles_within_shared_memory(
    config: FewRowsConfig,
    programs: int,
    rows: int,
    dtype: torch.dtype,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = []
    monkeypatch.setattr(few_rows, "launch_few_rows", lambda *launch: launches.append(launch))
    monkeypatch.setattr(few_rows, "has_pdl", lambda device: capability >= 90)
    linear = FewRowsLinear(torch.device("cpu"), lambda *shape: replace(config, programs=programs))
    x, weight = torch.empty(rows, 4096, dtype=dtype), torch.empty(96, 4096, dtype=dtype)
    linear(x, weight, None)
    linear.add_to(torch.empty(rows, 96, dtype=dtype), x, weight, torch.empty(96, dtype=dtype))
    assert len(launches) == 2
    for _, _, tensors, numbers, options in launches:
        compiled = compile_for(capability, few_rows_kernel, (*tensors, *numbers), options())
        assert compiled.metadata.shared <= A100_SHARED_MEMORY
        text = compiled.asm["ptx"]
        is_wide = config.transposed or rows == 64
        assert ("wgmma" in text) == (is_wide and capability >= 90), (
            "Hopper's tensor cores have 64 of one side at a time"
        )
        assert text.count("cp.async.commit_group") >= config.num_stages - 1, "loads are under way side by side"
        ahead, _, behind = text.partition("griddepcontrol.wait")
        assert bool(behind) == (capability >= 90), "what only Hopper has is guarded"
        if behind:
            assert "cp.async.cg" not in ahead, "only weights are touched before"
            assert "prefetch.global.L2" in ahead
        assert "prefetch" not in (behind or ahead)


def test_every_measured_configuration_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into an H200's shared memory, as it was measured there."""
    launches = []
    monkeypatch.setattr(few_rows, "launch_few_rows", lambda *launch: launches.append(launch))
    monkeypatch.setattr(few_rows, "has_pdl", lambda device: True)
    seen = set()
    for (out_features, in_features), by_rows in MEASURED.items():
        for rows, config in by_rows.items():
            linear = FewRowsLinear(torch.device("cpu"), lambda *shape, config=config: config)
            x = torch.empty(rows, in_features, dtype=torch.float16)
            linear(x, torch.empty(out_features, in_features, dtype=torch.float16), None)
    for _, _, tensors, numbers, options in launches:
        constants = tuple(sorted(options().items()))
        if constants not in seen:
            seen.add(constants)
            compiled = compile_for(90, few_rows_kernel, (*tensors, *numbers), options())
            assert compiled.metadata.shared <= H100_SHARED_MEMORY


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "dtype", "major", "multiprocessors", "is_ours"),
    [
        (16, 4096, 4096, torch.float16, 9, 132, True),
        (64, 4096, 11008, torch.bfloat16, 9, 132, True),
        (32, 12288, 4096, torch.float16, 9, 132, True),
        (64, 22016, 4096, torch.float16, 9, 132, False),  # measured: cuBLAS is faster
        (16, 5120, 5120, torch.float16, 9, 132, False),  # not measured
        (16, 4096, 4096, torch.float32, 9, 132, False),
        (16, 4096, 4096, torch.float16, 8, 132, False),
        (16, 4096, 4096, torch.float16, 9, 114, False),  # a smaller GPU, which other tiles fill
    ],
)
def test_what_was_not_measured_is_left_to_torch(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, major: int, multiprocessors: int,
    is_ours: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    about = SimpleNamespace(major=major, multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    for device, expected in (("cuda", is_ours), ("cpu", False)):
        config = choose_config(rows, out_features, in_features, dtype, torch.device(device))
        assert (config is not None) is expected
