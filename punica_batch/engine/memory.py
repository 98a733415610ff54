"""What an engine needs beside its weights, and how many KV blocks a GPU's rest holds. Arithmetic, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from punica_batch.errors import ModelError
from punica_batch.models.config import DTYPE_BYTES, ModelConfig
from punica_batch.types import Dtype

# Float32 copies of the logits that sampling holds at its peak, the half-precision ones they come from included.
LOGITS_COPIES = 4
# CUDA graphs of one engine share a pool of activations; beside it the driver keeps some MiB a graph.
GRAPH_BYTES = 1 << 30


def activation_bytes(config: ModelConfig, num_tokens: int, num_rows: int, dtype: Dtype) -> int:
    """Activations of one step at their peak: a layer's inputs and outputs for ``num_tokens`` (residual, norm, q, k, v,
    attention, gate, up and their product), and the logits of ``num_rows`` with what sampling makes of them."""
    per_token = 4 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
    logits = LOGITS_COPIES * num_rows * config.vocab_size * 4
    return num_tokens * per_token * DTYPE_BYTES[dtype] + logits


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A GPU once everything but the KV cache is there. Sizes in bytes.

    - ``total``, ``free``: the device's, whoever uses the rest; ``own``: what this process has allocated;
    - ``untouched``: what ``gpu_memory_utilization`` leaves free;
    - ``adapters``, ``step``: what the adapters and a step (activations, CUDA graphs) have yet to take.
    """

    total: int
    free: int
    own: int
    untouched: int
    adapters: int
    step: int

    @property
    def for_cache(self) -> int:
        return max(0, self.free - self.untouched - self.adapters - self.step)

    def num_blocks(self, block_bytes: int, *, wanted: int, needed: int) -> int:
        """``wanted`` blocks, or as many as fit beside one more, the scratch block.

        Raises ``ModelError`` saying what takes the memory when fewer than ``needed``, those of one full-length row, do.
        """
        blocks = min(wanted, self.for_cache // block_bytes - 1)
        if blocks < needed:
            raise self.too_small((needed + 1) * block_bytes)
        return blocks

    def too_small(self, needed_bytes: int) -> ModelError:
        others = max(0, self.total - self.free - self.own)
        return ModelError(
            f"a row of full length needs {_gib(needed_bytes)} of KV cache, and of the GPU's {_gib(self.total)} "
            f"{_gib(self.for_cache)} are left: {_gib(self.own)} hold weights and kernels, {_gib(others)} are CUDA's or "
            f"other processes', {_gib(self.adapters)} are kept for adapters, {_gib(self.step)} for a step and "
            f"{_gib(self.untouched)} by --gpu-memory-utilization: free the GPU, or change --max-model-len, "
            "--max-loras, --max-num-batched-tokens or --gpu-memory-utilization"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
