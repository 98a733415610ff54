"""Our logits against Hugging Face's and PEFT's, teacher-forced, for every architecture; and mutations that must fail.

One batch holds rows of adapters of ranks 1 to 128 and of the base model; prompts are prefilled in chunks, the rest is
decoded token by token.
"""

from __future__ import annotations

import parity_tools as tools
import pytest
import torch
from parity_tools import ARCHITECTURES, TinyModel

RANKS = [1, 2, 3, 8, 12, 16, 32, 64, 128]
# Prompts at and around the borders of blocks of 16; adapters in the order a, a, b, a and with base rows between.
ADAPTERS = ["r1", "r1", None, "r2", "r1", "r3", "r8", None, "r12", "r16", "r32", "r64", "r128", "r2"]
PROMPTS = [15, 16, 17, 32, 33, 1, 2, 31, 40, 20, 7, 48, 9, 64]
CONTINUATION = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    model = TinyModel.make(tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param], seed=7)
    for i, rank in enumerate(RANKS):
        model.add_adapter(f"r{rank}", seed=100 + i, r=rank, lora_alpha=[16, 2 * rank][i % 2])
    return model


def rows() -> list[tuple[str | None, list[int]]]:
    return tools.random_rows(ADAPTERS, [n + CONTINUATION for n in PROMPTS], seed=3)


@pytest.fixture(scope="module")
def expected(tiny: TinyModel) -> tuple[list[torch.Tensor], float]:
    return tiny.reference(rows()), tiny.tolerance(rows())


def test_adapters_matter(tiny: TinyModel, expected: tuple[list[torch.Tensor], float]) -> None:
    """The comparison can see an adapter: its logits are far from the base model's, compared to the tolerance."""
    answers, tolerance = expected
    base = tiny.reference([(None, ids) for _, ids in rows()])
    for (lora_id, _), ours, other in zip(rows(), answers, base, strict=True):
        assert (tools.max_error([ours], [other]) > 100 * tolerance) == (lora_id is not None)


@pytest.mark.parametrize("budget", [512, 23], ids=["whole", "chunked"])
def test_logits_in_float32(tiny: TinyModel, expected: tuple[list[torch.Tensor], float], budget: int) -> None:
    engine = tiny.engine(max_num_batched_tokens=budget, max_num_seqs=min(14, budget))
    ours = tools.teacher_forced(engine, rows(), PROMPTS)
    assert tools.max_error(ours, expected[0]) <= expected[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_in_half_precision(tiny: TinyModel, expected: tuple[list[torch.Tensor], float], dtype: str) -> None:
    """Our error against float32 is at most twice Hugging Face's own in the same precision, worst and mean."""
    exact = expected[0]
    theirs = tiny.reference(rows(), dtype=getattr(torch, dtype))
    engine = tiny.engine(dtype=dtype, kv_cache_dtype=dtype, max_num_batched_tokens=100)
    ours = tools.teacher_forced(engine, rows(), PROMPTS)
    assert tools.max_error(ours, exact) <= 2 * tools.max_error(theirs, exact)
    assert tools.mean_error(ours, exact) <= 2 * tools.mean_error(theirs, exact)
