"""The engine on a GPU against Hugging Face and PEFT on the CPU: logits, greedy text, adapters that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("peft")
import parity_tools as tools
from parity_tools import ALL, ARCHITECTURES, COMMON, Row, TinyModel
from transformers import LlamaConfig, Qwen2Config

from punica_batch.engine.engine import Engine

DEVICE = "cuda"
HALF = ("float16", "bfloat16")
# heads of 64, which FlashInfer has kernels for
CONFIGS = {
    "llama31": LlamaConfig(
        **COMMON, num_key_value_heads=2, head_dim=64, rope_parameters=ARCHITECTURES["llama31"].rope_parameters
    ),
    "qwen2": Qwen2Config(
        **COMMON | {"tie_word_embeddings": True, "num_attention_heads": 2, "hidden_size": 128}, num_key_value_heads=1
    ),
}
ADAPTERS = ["r1", "r1", None, "r3", "r1", "r8", "r8", None, "all", "r16", "r64", "r3", "few", "r128"]
PROMPTS = [15, 16, 17, 32, 33, 1, 2, 31, 40, 20, 7, 48, 9, 64]
CONTINUATION = 5
NEW_TOKENS = 24


@pytest.fixture(scope="module", params=list(CONFIGS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    model = TinyModel.make(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], seed=7)
    for i, rank in enumerate((1, 3, 8, 16, 64, 128)):
        model.add_adapter(f"r{rank}", seed=100 + i, r=rank)
    head = [] if CONFIGS[request.param].tie_word_embeddings else ["embed_tokens", "lm_head"]
    model.add_adapter("all", seed=110, target_modules=[*ALL, *head], r=2, rank_pattern={"down_proj": 5})
    model.add_adapter("few", seed=111, target_modules=["k_proj", "up_proj"], r=12, use_rslora=True)
    return model


def engine_of(tiny: TinyModel, dtype: str, **options: Any) -> Engine:
    return tiny.engine(device=DEVICE, dtype=dtype, kv_cache_dtype=dtype, **options)


def long_rows() -> list[Row]:
    return tools.random_rows(ADAPTERS, [n + CONTINUATION for n in PROMPTS], seed=3)


@pytest.fixture(scope="module")
def exact(tiny: TinyModel) -> list[torch.Tensor]:
    return tiny.reference(long_rows())


def test_flashinfer_is_used(tiny: TinyModel) -> None:
    for dtype in HALF:
        assert engine_of(tiny, dtype).runner.model.kernels.note is None
    with pytest.warns(UserWarning, match="plain torch"):
        engine_of(tiny, "float32")


@pytest.mark.filterwarnings("ignore:attention runs in plain torch")
@pytest.mark.parametrize("budget", [512, 23], ids=["whole", "chunked"])
def test_logits_in_float32(tiny: TinyModel, exact: list[torch.Tensor], budget: int) -> None:
    engine = engine_of(tiny, "float32", max_num_batched_tokens=budget, max_num_seqs=14)
    ours = tools.teacher_forced(engine, long_rows(), PROMPTS)
    assert tools.max_error(ours, exact) <= tiny.tolerance(long_rows())


@pytest.mark.parametrize("budget", [512, 23], ids=["whole", "chunked"])
@pytest.mark.parametrize("dtype", HALF)
def test_logits_in_half_precision(tiny: TinyModel, exact: list[torch.Tensor], dtype: str, budget: int) -> None:
    """Our error against float32 is at most twice Hugging Face's own in the same precision, worst and mean."""
    theirs = tiny.reference(long_rows(), dtype=getattr(torch, dtype))
    engine = engine_of(tiny, dtype, max_num_batched_tokens=budget, max_num_seqs=14)
    ours = tools.teacher_forced(engine, long_rows(), PROMPTS)
    print(
        f"{dtype}: worst {tools.max_error(ours, exact):.4f}, Hugging Face's {tools.max_error(theirs, exact):.4f}; "
        f"mean {tools.mean_error(ours, exact):.5f}, Hugging Face's {tools.mean_error(theirs, exact):.5f}"
    )
    assert tools.max_error(ours, exact) <= 2 * tools.max_error(theirs, exact)
    assert tools.mean_error(ours, exact) <= 2 * tools.mean_error(theirs, exact)


def rows() -> list[Row]:
    return tools.random_rows(ADAPTERS, PROMPTS, seed=21)


@pytest.fixture(scope="module")
def greedy(tiny: TinyModel) -> dict[int, list[int]]:
    """Hugging Face's answers in float32."""
    found: dict[int, list[int]] = {}
    with tiny.hf_model() as answer, torch.no_grad():
        for row, (lora_id, prompt) in enumerate(rows()):
            ids = list(prompt)
            for _ in range(NEW_TOKENS):
                ids.append(int(answer(lora_id, torch.tensor([ids]))[0, -1].argmax()))
            found[row] = ids[len(prompt) :]
    return found


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one batch"),
        pytest.param({"max_num_batched_tokens": 19, "max_num_seqs": 12}, id="chunked"),
        pytest.param({"num_blocks": 13, "block_size": 8, "max_model_len": 88}, id="preempted"),
        pytest.param({"max_loras": 1}, id="one slot for all adapters"),
        pytest.param({"max_loras": 2, "read_ahead": 1}, id="two slots"),
    ],
)
def test_greedy_text(tiny: TinyModel, greedy: dict[int, list[int]], options: dict[str, int], dtype: str) -> None:
    """Hugging Face's in float32, up to a token whose lead over ours is within half precision's own error."""
    requests = tools.requests_of(rows(), max_tokens=NEW_TOKENS, ignore_eos=True)
    results = tools.generate(engine_of(tiny, dtype, **options), requests)
    ours = {row: tools.tokens(result)[0] for row, result in results.items()}
    parted = {
        row: next(i for i in range(NEW_TOKENS) if ours[row][i] != greedy[row][i])
        for row in ours
        if ours[row] != greedy[row]
    }
    given = [(rows()[row][0], rows()[row][1] + greedy[row][:first]) for row, first in parted.items()]
    exact, half = tiny.reference(given), tiny.reference(given, dtype=getattr(torch, dtype))
    print(f"{dtype} {options}: {len(parted)} of {len(ours)} rows part from float32's text")
    for (row, first), right, rounded in zip(parted.items(), exact, half, strict=True):
        gap = float(right[-1].max() - right[-1][ours[row][first]])
        assert gap <= 4 * tools.max_error([rounded], [right]), f"row {row} parts at token {first}, {gap} apart"


def test_an_adapter_above_the_largest_rank_fails_alone(tiny: TinyModel) -> None:
    engine = engine_of(tiny, "bfloat16", max_lora_rank=16)
    results = tools.generate(engine, tools.requests_of(rows(), max_tokens=3, ignore_eos=True))
    for row, (lora_id, _) in enumerate(rows()):
        error = results[row].error
        assert (error is not None) == (lora_id in ("r64", "r128")), error
        assert error is None or "rank is" in error
