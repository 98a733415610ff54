"""What ``doctor`` asks of a GPU machine's libraries: its kernel compiles wherever ours do."""

from __future__ import annotations

import pytest
import torch
from aot import NEEDS_COMPILER, compile_for
from punica_batch_kernels import probe
from punica_batch_kernels.probe_kernel import add_one

pytestmark = NEEDS_COMPILER


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles(capability: int) -> None:
    compile_for(capability, add_one, (torch.empty(1, dtype=torch.int32),), {})


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no compiler found", "no compiler found"),
        ("first\nsecond", "first"),
        ("at 1:15:\ndef f(x: Any):\n   ^\nNameError('no Any')\n", "at 1:15: NameError('no Any')"),
        ("", ""),
    ],
)
def test_an_error_in_a_line(message: str, line: str) -> None:
    assert probe._line(RuntimeError(message)) == f"RuntimeError: {line}"
