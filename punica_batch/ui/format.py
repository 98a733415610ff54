"""Numbers for people: counts, rates, durations, sizes."""

from __future__ import annotations

from collections.abc import Mapping


def count(number: float) -> str:
    return f"{number:,.0f}"


def short(number: float) -> str:
    """At most five characters: 950, 12.3k, 4.5M, 1.2G."""
    for unit in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.0f}{unit}" if not unit or abs(number) >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def duration(seconds: float) -> str:
    """0:07, 12:34, 3:25:00, 2d 03:25."""
    whole = max(0, round(seconds))
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def size(num_bytes: float) -> str:
    """Binary units, as memory is sold: 512 MiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def kib(num_bytes: float) -> str:
    """2,768 KiB: sizes that are to be compared, in a column."""
    return f"{count(num_bytes / 1024)} KiB"


def plural(number: int, noun: str) -> str:
    """1 row, 2,000 rows"""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def errors(errors_by_code: Mapping[str, int]) -> str:
    """overlong 12 · unknown_adapter 3, the most frequent first."""
    ordered = sorted(errors_by_code.items(), key=lambda item: (-item[1], item[0]))
    return " · ".join(f"{code} {count(number)}" for code, number in ordered)
