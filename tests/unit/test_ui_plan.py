"""A plan for people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from punica_batch.planner.plan import AdapterRows, PlacementSummary, Preview, PreviewToken
from punica_batch.ui.plan import _adapters, _preview, _workers


@pytest.mark.parametrize("width", [16, 30, 80])
def test_the_preview_breaks_between_tokens(width: int) -> None:
    names = ["<s>", "###", "ĠMessage", "a b", "\n", "漢字", "Ġorder"]
    tokens = tuple(PreviewToken(100 + i, name) for i, name in enumerate(names))
    console = Console(file=io.StringIO(), width=width)
    for view in _preview(Preview(3, None, tokens)):
        console.print(view)
    assert isinstance(console.file, io.StringIO)
    heading, _, body = console.file.getvalue().strip().partition(")\n")
    assert heading.split() == ["first", "tokens", "of", "row", "3", "(base", "model"]
    lines = body.splitlines()
    assert all(line.startswith("⟨") and line.endswith("⟩") for line in lines), "no line begins inside a token"
    assert all(len(line) <= width for line in lines if line.count("⟨") > 1)
    shown = ["\\n" if name == "\n" else name for name in names]
    assert "".join(lines) == "".join(f"⟨{100 + i} {name}⟩" for i, name in enumerate(shown))


def test_workers_in_words() -> None:
    assert _workers(PlacementSummary("cpu", 1, ("0",), "busiest", 1)) == "1 CPU worker"
    assert _workers(PlacementSummary("cuda", 4, ("a", "b", "c", "d"), "busiest", 2)) == (
        "4 GPU workers: each is filled before the next gets rows (--pack busiest); the job fills 2"
    )
    assert _workers(PlacementSummary("cpu", 2, ("0", "1"), "spread", 2)) == (
        "2 CPU workers: all get the same share (--pack spread)"
    )


def test_adapter_sizes_are_those_in_memory() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(_adapters((AdapterRows("a", 1200, 16, 1_433_600), AdapterRows("b", 1, None, None, "x: y"))))
    assert isinstance(console.file, io.StringIO)
    header, first, second = console.file.getvalue().splitlines()
    assert header.split() == ["adapter", "rows", "rank", "in", "memory"]
    assert (first.split(), second.split()) == (["a", "1,200", "16", "1,400", "KiB"], ["b", "1", "–", "–"])
