"""The jobs: what each adapter answers to a message, and the shape of its LoRA weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from messages import Message, draw_message
from phrases import LANGUAGES, SENTIMENTS, TOPICS, URGENCIES

ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NONE = "none"  # what an extractor answers where there is nothing to extract


@dataclass(frozen=True)
class Task:
    """One adapter's job. ``lora`` are the arguments of ``peft.LoraConfig``; ``dtype`` is that of the saved file."""

    name: str
    answer: Callable[[Message], str]
    max_tokens: int
    lora: dict[str, Any]
    labels: tuple[str, ...] | None = None
    attribute: str | None = None  # the message's attribute that the labels are, for balanced classes
    draw: dict[str, Any] = field(default_factory=dict)  # attributes fixed for this job's messages
    dtype: str = "bfloat16"
    learning_rate: float = 2e-3
    steps: int = 500

    def example(self, rng: random.Random, *, held_out: bool, label: str | None = None) -> tuple[str, str]:
        """(message, answer): a message of the training set or of the held-out one, of class ``label`` if given."""
        fixed = dict(self.draw)
        while True:
            if self.attribute and self.labels:
                fixed[self.attribute] = label or rng.choice(self.labels)
            message = draw_message(rng, **fixed)
            if message.held_out == held_out:
                return message.text, self.answer(message)


def _redact(message: Message) -> str:
    return message.render(order="[ORDER]", email="[EMAIL]", name="[NAME]")


TASKS: tuple[Task, ...] = (
    Task(
        "sentiment", lambda message: message.sentiment, 8, {"r": 8, "lora_alpha": 16},
        labels=SENTIMENTS, attribute="sentiment",
    ),
    Task(
        "topic", lambda message: message.topic, 8, {"r": 16, "lora_alpha": 16, "use_rslora": True},
        labels=TOPICS, attribute="topic", learning_rate=1e-3,
    ),
    Task(
        "urgency", lambda message: message.urgency, 8,
        {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        labels=URGENCIES, attribute="urgency", dtype="float16", steps=800,
    ),
    Task(
        "language", lambda message: message.language, 8, {"r": 2, "lora_alpha": 4},
        labels=LANGUAGES, attribute="language", dtype="float32",
    ),
    Task("order-number", lambda message: message.order or NONE, 16, {"r": 12, "lora_alpha": 24}),
    Task(
        "email", lambda message: message.email or NONE, 40,
        {
            "r": 6, "lora_alpha": 12,
            "rank_pattern": {"down_proj": 16, "layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {"down_proj": 24, "v_proj": 6},
        },
        steps=1000,
    ),
    Task("redact", _redact, 160, {"r": 20, "lora_alpha": 40}, learning_rate=1.5e-3, steps=1400),
    Task(
        "formal", lambda message: message.render(casual=False), 160, {"r": 32, "lora_alpha": 64},
        draw={"language": "english", "casual": True}, learning_rate=1.5e-3, steps=1400,
    ),
)  # fmt: skip

WORDS: tuple[str, ...] = tuple(
    sorted({NONE, "[ORDER]", "[EMAIL]", "[NAME]", *(label for task in TASKS for label in task.labels or ())})
)


def task_named(name: str) -> Task:
    return next(task for task in TASKS if task.name == name)
