"""What the model is given of the resident adapters: fused groups, slot by slot. The engine's LoRA store fills it."""

from __future__ import annotations

from dataclasses import dataclass, field

from punica_batch_kernels.sgmv.types import LoraGroup
from torch import Tensor

from punica_batch.models.config import ModelConfig

# Which projections share an input and so form one fused group, as slices in this order.
FUSED_PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(slots=True)
class LayerLora:
    """One layer's four groups; slices as ``FUSED_PROJECTIONS`` orders them."""

    qkv: LoraGroup
    o: LoraGroup
    gate_up: LoraGroup
    down: LoraGroup


@dataclass(slots=True)
class ModelLora:
    """Every group of the model. All weights have the model's dtype and device.

    ``embeddings[slot]``: (A [rank, vocab], B [hidden, rank], the scale folded into B), None where the slot's adapter
    does not touch the embedding.
    """

    layers: list[LayerLora]
    lm_head: LoraGroup
    embeddings: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    def touches_ends(self, slot: int) -> bool:
        """Whether the slot's adapter adds to the embedding or the head."""
        return self.embeddings[slot] is not None or self.lm_head.slots[slot] is not None

    @classmethod
    def empty(cls, config: ModelConfig, num_slots: int) -> ModelLora:
        """All groups with their sizes and ``num_slots`` slots that hold nothing yet."""
        shapes = config.lora_modules()

        def group(names: list[str]) -> LoraGroup:
            offsets = [0]
            for name in names:
                offsets.append(offsets[-1] + shapes[name][0])
            return LoraGroup(shapes[names[0]][1], tuple(offsets), [None] * num_slots)

        layers = [
            LayerLora(**{
                key: group([f"model.layers.{i}.{name}" for name in names]) for key, names in FUSED_PROJECTIONS.items()
            })
            for i in range(config.num_hidden_layers)
        ]  # fmt: skip
        return cls(layers, group(["lm_head"]), [None] * num_slots)
