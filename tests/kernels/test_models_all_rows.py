"""Large prefills through whole models, in Triton's interpreter: the fused kernels against the plain ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, run_in_interpreter

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

else:
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
    import model_harness
    from punica_batch_kernels.backend import REFERENCE, Kernels
    from punica_batch_kernels.sgmv import triton_backend
    from punica_batch_kernels.sgmv.linear import TritonFusedProducts, base_first
    from punica_batch_kernels.sgmv.slot_table import SlotTables
    from punica_batch_kernels.sgmv.tiles import build_tiles
    from punica_batch_kernels.sgmv.types import Segments
    from sgmv_cases import make_slot

    from punica_batch.models.config import ModelConfig
    from punica_batch.models.lora import ModelLora
    from punica_batch.models.weights import load_model

    class Counted(TritonFusedProducts):
        calls = 0

        def rope_and_write_kv(self, *args: Any) -> torch.Tensor:
            self.calls += 1
            return super().rope_and_write_kv(*args)

        def silu_and_mul(self, *args: Any) -> torch.Tensor:
            self.calls += 1
            return super().silu_and_mul(*args)

    # of slots 0 to 2, and of a group's slices in turn; 0: the adapter leaves it alone
    RANKS = ((2, 2, 2), (5, 0, 40), (0, 3, 0))
    SLOTS = [0, -1, 1, 2]

    class AllRows:
        """Stands for ``Segments``: every step is taken for a large prefill."""

        @staticmethod
        def build(starts: list[int], slots: list[int]) -> Segments:
            return Segments.build(starts, slots, tiles=build_tiles(starts, slots, "cpu", all_rows=True), all_rows=True)

    def adapters(config: ModelConfig) -> ModelLora:
        torch.manual_seed(5)
        lora = ModelLora.empty(config, len(RANKS))
        groups = [group for layer in lora.layers for group in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        for group in groups:
            widths = [stop - start for start, stop in pairwise(group.out_offsets)]
            for slot, ranks in enumerate(RANKS):
                group.slots[slot] = make_slot(ranks[: len(widths)], group.in_features, widths, torch.empty(0))
        groups.append(lora.lm_head)
        lora.lm_head.slots[0] = make_slot([2], lora.lm_head.in_features, [config.vocab_size], torch.empty(0))
        SlotTables(groups, 40, torch.float32, "cpu")
        return lora

    @pytest.mark.parametrize("name", ["smollm", "mistral", "qwen2", "qwen3"])
    def test_as_the_plain_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Grouped heads, a window, biases, norms of heads; base rows between the adapters' rows."""
        model_harness.save_hf_model(name, tmp_path)
        config = ModelConfig.from_folder(tmp_path)
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, config.vocab_size, (n,), generator=generator) for n in (9, 14, 3, 11)]

        def logits(kernels: Kernels, segments: Any) -> torch.Tensor:
            monkeypatch.setattr(model_harness, "Segments", segments)
            model = load_model(config, tmp_path, torch.float32, "cpu")
            model.use(kernels)
            driver = model_harness.Driver(model, prompts, SLOTS)
            driver.lora = adapters(config)
            return torch.cat(driver.run("whole"))

        want, fused = logits(REFERENCE, Segments), Counted()
        kernels = replace(REFERENCE, add_lora=triton_backend.add_lora, ordered_lora_linear=base_first, fused=fused)
        torch.testing.assert_close(logits(kernels, AllRows), want, atol=1e-4, rtol=1e-4)
        assert fused.calls == 2 * 2 * config.num_hidden_layers, "all of both passes: of all rows, and of those kept"
