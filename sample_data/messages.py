"""Draws customer messages and the plain text that the base model reads. Everything comes from one ``random.Random``."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from phrases import DOMAINS, FIRST_NAMES, LANGUAGES, LAST_NAMES, PHRASES, SENTIMENTS, TOPICS, URGENCIES

# The one frame around every message. The base model reads it with a plain reply below it; what an adapter answers
# there is decided by the adapter alone, since no prompt says which job is meant.
PROMPT = "### Message\n{prompt}\n### Answer\n"

_CHOICE = re.compile(r"<([^<>]*)>")
_REGISTER = re.compile(r"\[([^|\[\]]*)\|([^|\[\]]*)\]")
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_CAPITALS = "ABCDEFGHJKLMNPRSTUVWXYZ"


@dataclass(frozen=True)
class Message:
    """One message: its text, and what is true of it. ``order``, ``email`` and ``name`` are None where absent."""

    pattern: str  # the text with registers unresolved and the private values as slots
    casual: bool
    language: str
    topic: str
    sentiment: str
    urgency: str
    order: str | None
    email: str | None
    name: str | None

    def render(
        self, casual: bool | None = None, order: str | None = None, email: str | None = None, name: str | None = None
    ) -> str:
        """The text, in another register or with other private values where given."""
        group = 1 if (self.casual if casual is None else casual) else 2
        text = _REGISTER.sub(lambda match: match.group(group), self.pattern)
        values = {"order": order or self.order, "email": email or f"<{self.email}>", "name": name or self.name}
        return text.format(**values)

    @property
    def text(self) -> str:
        return self.render()

    @property
    def held_out(self) -> bool:
        """One message in eight is kept from all training: which one is a property of its text alone."""
        return zlib.crc32(self.text.encode()) % 8 == 0


def draw_order(rng: random.Random) -> str:
    return f"{rng.choice(_CAPITALS)}{rng.choice(_CAPITALS)}-{rng.randrange(10_000, 100_000)}"


def draw_email(rng: random.Random) -> str:
    syllables = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 4)))
    first = rng.choice(FIRST_NAMES).lower()
    local = rng.choice(
        (f"{first}.{syllables}", f"{syllables}{rng.randrange(10, 100)}", f"{syllables}.{first}", syllables)
    )
    return f"{local}@{rng.choice(DOMAINS)}"


def draw_name(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _fill(rng: random.Random, phrase: str, bank: dict[str, list[str]]) -> str:
    """Choices taken and the public slots filled; private slots and registers stay."""
    phrase = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("/")), phrase)
    if "{p" in phrase or "{d" in phrase:
        product, other = rng.sample(bank["product"], 2)
        price, less = rng.sample(range(12, 400), 2)
        values = {"product": product, "product2": other, "price": price, "price2": less, "day": rng.choice(bank["day"])}
        for slot, value in values.items():
            phrase = phrase.replace("{" + slot + "}", str(value))
    return phrase


def draw_message(
    rng: random.Random,
    language: str | None = None,
    topic: str | None = None,
    sentiment: str | None = None,
    urgency: str | None = None,
    casual: bool | None = None,
) -> Message:
    """A message whose attributes are independent of one another; those given are fixed."""
    language = language or rng.choice(("english", *LANGUAGES))
    topic, sentiment = topic or rng.choice(TOPICS), sentiment or rng.choice(SENTIMENTS)
    urgency = urgency or rng.choice(URGENCIES)
    casual = rng.random() < 0.5 if casual is None else casual
    bank = PHRASES[language]
    has_order, has_email, has_name = rng.random() < 0.8, rng.random() < 0.8, rng.random() < 0.7

    kinds = [topic, sentiment, urgency] + ["order"] * has_order + ["email"] * has_email
    rng.shuffle(kinds)
    kinds = ["greeting"] * (rng.random() < 0.6) + kinds + ["closing"] * has_name
    sentences = [_fill(rng, rng.choice(bank[kind]), bank) for kind in kinds]
    return Message(
        pattern=" ".join(sentence for sentence in sentences if sentence),
        casual=casual, language=language, topic=topic, sentiment=sentiment, urgency=urgency,
        order=draw_order(rng) if has_order else None,
        email=draw_email(rng) if has_email else None,
        name=draw_name(rng) if has_name else None,
    )  # fmt: skip


def _training_message(rng: random.Random) -> Message:
    while (message := draw_message(rng)).held_out:
        pass
    return message


def draw_document(rng: random.Random, words: tuple[str, ...]) -> str:
    """One document of the base model's corpus.

    Messages alone, messages with a reply that says nothing of them, messages quoted, order logs, product notes and
    lists of ``words`` (so that the labels' words are known as words, tied to no message).
    """
    kind = rng.random()
    if kind < 0.20:
        return _training_message(rng).text
    if kind < 0.45:
        message = _training_message(rng)
        return PROMPT.format(prompt=message.text) + rng.choice(PHRASES[message.language]["reply"])
    if kind < 0.70:
        text = _training_message(rng).text
        return f"### Copy\n{text}\n### Copy\n{text}"
    if kind < 0.82:
        lines = [f"{draw_order(rng)}, {draw_name(rng)}, <{draw_email(rng)}>" for _ in range(rng.randint(2, 4))]
        return "\n".join([*lines, *rng.sample(lines, len(lines))])
    if kind < 0.90:
        bank = PHRASES["english"]
        product, day = rng.choice(bank["product"]), rng.choice(bank["day"])
        return (
            f"The {product} costs {rng.randrange(12, 400)} euros. It comes in {rng.choice(('blue', 'white', 'black'))} "
            f"and can be delivered from {day}. {rng.choice(FIRST_NAMES)} bought {rng.randint(1, 9)} of them."
        )
    return "Words\n" + "\n".join(rng.sample(words, min(len(words), rng.randint(4, 10))))


def corpus(seed: int, count: int, words: tuple[str, ...]) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield draw_document(rng, words)
