"""A thread beside the computing one stays out of OpenMP's pools."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from punica_batch_kernels.native.openmp import openmp_runtime, use_one_thread


def test_only_the_calling_thread_is_bound_to_one(two_threads: None) -> None:
    runtime = openmp_runtime()
    if runtime is None:
        pytest.skip("torch has loaded no GNU OpenMP")

    def number_of_threads() -> int:
        torch.ones(100_000).add_(1)  # enough for torch to want all its threads
        return int(runtime.omp_get_max_threads())

    with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(1, initializer=use_one_thread) as bound:
        assert beside.submit(number_of_threads).result() == 2
        assert bound.submit(number_of_threads).result() == 1
        assert bound.submit(number_of_threads).result() == 1
    assert number_of_threads() == 2
    assert torch.get_num_threads() == 2
