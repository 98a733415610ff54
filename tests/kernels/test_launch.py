"""The cheap launch path against a kernel that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from punica_batch_kernels.launch import Launcher
from torch import Tensor

runtime = pytest.importorskip("triton.runtime", reason="Triton is not installed")


class Compiled:
    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Kernel:
    """``slow``: launches through Triton; ``direct``: launches of what it compiled."""

    arg_names = ("a", "b", "c", "d", "n", "stride", "BLOCK", "PDL")

    def __init__(self) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.compiled: Any = Compiled(self.direct)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.slow.append((grid, args, options))
            return self.compiled

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_stream=lambda device: 500 + device)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=active))
    return Kernel()


def tensors(offset: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = torch.zeros(64)
    start = (-flat.data_ptr() // 4) % 4  # at 16 bytes
    a, b, c, d = (flat[start + 8 * i :] for i in range(4))
    return a, b[offset:], c, d


def options() -> dict[str, Any]:
    return {"BLOCK": 16, "PDL": False}


def test_triton_compiles_once_a_key_and_then_is_not_asked(kernel: Kernel) -> None:
    launch, given = Launcher(kernel), tensors()
    launch("first", 3, given, (5, 32), options)
    assert (kernel.slow, kernel.direct) == ([((3,), (*given, 5, 32), options())], [])
    launch("first", 4, given, (6, 32), options)
    pointers = tuple(t.data_ptr() for t in given)
    head = (4, 1, 1, 499, 77, (4, 1, 0), None, None, None)  # a CPU tensor's device is -1
    assert kernel.direct == [(*head, *pointers, 6, 32, None, None)]
    launch("second", 1, given, (5, 48), options)
    assert len(kernel.slow) == 2


def test_unaligned_pointers_go_through_triton(kernel: Kernel) -> None:
    launch = Launcher(kernel)
    for given in (tensors(1), tensors(), tensors(1), tensors()):
        launch("key", 1, given, (1, 1), options)
    assert (len(kernel.slow), len(kernel.direct)) == (3, 1), "no unaligned launch compiles for, or takes, the aligned"


def test_without_a_compiled_kernel_triton_serves_on(kernel: Kernel) -> None:
    """As in the interpreter."""
    kernel.compiled = None
    launch = Launcher(kernel)
    for _ in range(3):
        launch("key", 1, tensors(), (1, 1), options)
    assert len(kernel.slow) == 3


def test_a_launcher_of_other_parameters_is_not_tried_twice(kernel: Kernel) -> None:
    class Other(Compiled):
        def run(self, *args: Any) -> None:
            self.calls.append(args)
            raise TypeError("function takes 30 arguments")

    kernel.compiled = Other(kernel.direct)
    launch = Launcher(kernel)
    for _ in range(4):
        launch("key", 1, tensors(), (1, 1), options)
    assert (len(kernel.slow), len(kernel.direct)) == (4, 1)
