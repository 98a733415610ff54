"""A GPU that has failed is told from all that a process can go on after."""

from __future__ import annotations

import pytest
import torch
from punica_batch_kernels.sgmv.types import LoraGroup

from punica_batch.engine.device_errors import is_device_error
from punica_batch.engine.lora_pack import PackedAdapter
from punica_batch.engine.lora_store import LoraStore
from punica_batch.models.lora import ModelLora

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def caused(error: BaseException) -> RuntimeError:
    outer = RuntimeError("loading failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error", [RuntimeError(ILLEGAL), torch.AcceleratorError(ILLEGAL), caused(RuntimeError(ILLEGAL))]
)
def test_failed_devices(error: BaseException) -> None:
    assert is_device_error(error)


@pytest.mark.parametrize(
    "error",
    [
        None, RuntimeError("shapes do not match"), ValueError(ILLEGAL), caused(OSError("no such file")),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), torch.OutOfMemoryError(ILLEGAL),
    ],
    ids=repr,
)  # fmt: skip
def test_other_errors(error: BaseException | None) -> None:
    assert not is_device_error(error)


def test_a_device_that_fails_while_an_adapter_loads_is_not_that_adapters_fault() -> None:
    """The worker has to die of it: adapters that are called unreadable would cost their rows."""

    def load(lora_id: str) -> PackedAdapter:
        raise caused(torch.AcceleratorError(ILLEGAL))

    store = LoraStore(ModelLora([], LoraGroup(1, (0, 1), [None]), [None]), load, max_loras=1)
    store.request("a")
    store.wait(10)
    with pytest.raises(RuntimeError, match="loading failed"):
        store.poll()
    assert not store.failures
    store.close()
