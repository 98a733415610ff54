"""The C kernels, compiled once for all their tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from punica_batch_kernels.native.kernels import NativeKernels, load_native


@pytest.fixture(scope="session")
def native_kernels(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    loaded = load_native(tmp_path_factory.mktemp("native"))
    if loaded is None:
        pytest.skip("no C compiler on this machine")
    return loaded


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
