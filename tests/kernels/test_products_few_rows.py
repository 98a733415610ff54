"""Products of few rows in Triton's interpreter, on the CPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from interpreter import INTERPRETED, run_in_interpreter
from products_cases import check, operands

pytest.importorskip("triton", reason="Triton is not installed")

from punica_batch_kernels.products.few_rows import FewRowsLinear
from punica_batch_kernels.products.few_rows_config import FewRowsConfig

CPU = torch.device("cpu")
PLAIN = FewRowsConfig(block_n=32, block_k=64, transposed=False, num_warps=4, num_stages=2)
CONFIGS = {
    "a tile each": PLAIN,
    "transposed": replace(PLAIN, transposed=True),
    "split": replace(PLAIN, split_k=3, transposed=True),
    "shared by 5": replace(PLAIN, programs=5),
    "shared by 1": replace(PLAIN, programs=1, transposed=True),
    "shared by 23": replace(PLAIN, programs=23),
    "shared by more than there are blocks": replace(PLAIN, programs=1000),
}


def linear_by(config: FewRowsConfig | None) -> FewRowsLinear:
    return FewRowsLinear(CPU, lambda *shape: config)


if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

    def test_left_to_torch_it_is_the_same_function() -> None:
        for rows, config in ((3, None), (65, PLAIN)):
            check(linear_by(config), *operands(rows, 40, 24, torch.float32, CPU, bias=True))

else:

    @pytest.fixture(autouse=True)
    def seeded_and_filled() -> Iterator[None]:
        """What is not written stays NaN."""
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.fixture
    def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel has to do it."""

        def refuse(*args: object) -> None:
            raise AssertionError("left to torch")

        monkeypatch.setattr("punica_batch_kernels.products.few_rows.functional.linear", refuse)
        monkeypatch.setattr("punica_batch_kernels.products.few_rows.add_linear", refuse)

    @pytest.mark.usefixtures("no_torch")
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
    def test_odd_sizes(config: FewRowsConfig) -> None:
        linear = linear_by(config)
        for rows, out_features, in_features, bias in (
            (1, 32, 64, False),
            (5, 100, 200, True),
            (17, 70, 328, False),
            (64, 130, 136, True),
        ):
            check(linear, *operands(rows, out_features, in_features, torch.float16, CPU, bias=bias))

    @pytest.mark.usefixtures("no_torch")
    @pytest.mark.parametrize("config", [CONFIGS["transposed"], CONFIGS["shared by 23"]], ids=str)
    def test_in_float32(config: FewRowsConfig) -> None:
        check(linear_by(config), *operands(9, 70, 328, torch.float32, CPU, bias=True))

    @pytest.mark.usefixtures("no_torch")
    def test_strided_rows() -> None:
        linear = linear_by(CONFIGS["shared by 5"])
        x, weight, bias = operands(6, 96, 192, torch.float16, CPU, bias=True)
        wide = torch.full((6, 256), float("nan"), dtype=torch.float16)
        wide[:, 8:200] = x
        check(linear, wide[:, 8:200], weight, bias)

    @pytest.mark.usefixtures("no_torch")
    def test_a_row_does_not_depend_on_the_others_of_its_bucket() -> None:
        linear = linear_by(CONFIGS["shared by 5"])
        x, weight, _ = operands(16, 96, 192, torch.float16, CPU, bias=False)
        assert torch.equal(linear(x, weight, None)[3:5], linear(x[3:5], weight, None))
