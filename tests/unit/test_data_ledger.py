"""Recording thousands of adapters one after the other does not read the record of all the others each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from punica_batch.data import ledger
from punica_batch.data.ledger import AdapterLedger
from punica_batch.errors import BindingError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every reading of a ledger's file."""
    seen: list[Path] = []
    read_lines = ledger.read_lines

    def counted(path: Path, *, repair: bool = True) -> list[object]:
        seen.append(path)
        return read_lines(path, repair=repair)

    monkeypatch.setattr(ledger, "read_lines", counted)
    return seen


def test_binding_one_by_one_reads_nothing_again(tmp_path: Path, reads: list[Path]) -> None:
    one = AdapterLedger(tmp_path / "adapters", (), remote=False)
    for i in range(50):
        one.bind({f"adapter-{i}": f"{i:064x}"})
    assert not reads
    assert AdapterLedger(tmp_path / "adapters", (), remote=False).digests == one.digests
    assert len(one.digests) == 50


def test_what_another_slice_bound_meanwhile_is_seen(tmp_path: Path) -> None:
    one, two = (AdapterLedger(tmp_path / "adapters", (), remote=False) for _ in range(2))
    one.bind({"a": "1" * 64})
    two.bind({"b": "2" * 64})
    one.bind({"c": "3" * 64})
    with pytest.raises(BindingError, match="adapter 'b'"):
        one.bind({"b": "4" * 64})
    with pytest.raises(BindingError, match="adapter 'c'"):
        two.bind({"c": "4" * 64})
    assert one.digests == two.digests == {"a": "1" * 64, "b": "2" * 64, "c": "3" * 64}


def test_a_torn_last_line_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    AdapterLedger(path, (), remote=False).bind({"a": "1" * 64})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    one = AdapterLedger(path, (), remote=False)
    assert one.digests == {"a": "1" * 64}
    one.bind({"b": "2" * 64})
    assert AdapterLedger(path, (), remote=False).digests == {"a": "1" * 64, "b": "2" * 64}
