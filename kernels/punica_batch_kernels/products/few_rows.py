"""Products of few rows in Triton, where those read their weights faster than cuBLAS does; else cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from punica_batch_kernels.launch import Launcher, has_pdl
from punica_batch_kernels.products.few_rows_config import MAX_ROWS, FewRowsConfig, choose_config, row_bucket
from punica_batch_kernels.products.few_rows_kernels import few_rows_kernel
from punica_batch_kernels.products.reference import add_linear

# rows, out_features, in_features, dtype, device; None: leave it to cuBLAS
Choose = Callable[[int, int, int, torch.dtype, torch.device], FewRowsConfig | None]

launch_few_rows = Launcher(few_rows_kernel, aligned=4)

_MAX_TILES = 1 << 15
_INT32 = 1 << 31


class FewRowsLinear:
    """``torch.nn.functional.linear`` and ``reference.add_linear`` on one device, and on one of its streams at a time.

    The same inputs give the same bits; a row's bits depend on the others no further than that 16, 32 and 64 rows are
    summed in different orders, and more by cuBLAS. Launches synchronize nothing and can be captured in a graph.
    """

    def __init__(self, device: torch.device, choose: Choose = choose_config) -> None:
        self._choose = choose
        self._plans: dict[tuple[int, int, int, torch.dtype], _Plan | None] = {}
        self._device = device

    @cached_property
    def _counters(self) -> Tensor:
        """Programs that have their part of a tile, 0 between launches."""
        return torch.zeros(_MAX_TILES, dtype=torch.int32, device=self._device)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, a new tensor; ``x`` [T, in], ``weight`` [out, in], ``bias`` [out] or None."""
        plan = self._plan(x, weight)
        if plan is None:
            return functional.linear(x, weight, bias)
        y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        plan.launch(y, x, weight, bias, self._counters, accumulate=False)
        return y

    def add_to(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """y += x W^T + b in place, ``y`` [T, out]; the sum is rounded once but for a bias that is left to torch."""
        plan = self._plan(x, weight) if y.stride(1) == 1 and y.dtype is x.dtype else None
        if plan is None:
            add_linear(y, x, weight, bias)
        else:
            plan.launch(y, x, weight, bias, self._counters, accumulate=True)

    def _plan(self, x: Tensor, weight: Tensor) -> _Plan | None:
        """None where ``choose`` says so, and for what the kernel does not take."""
        rows, (out_features, in_features) = x.shape[0], weight.shape
        if not 0 < rows <= MAX_ROWS:
            return None
        if x.dim() != 2 or x.stride(1) != 1 or not weight.is_contiguous() or x.dtype is not weight.dtype:
            return None
        key = (row_bucket(rows), out_features, in_features, x.dtype)
        if key not in self._plans:
            config = self._choose(*key, x.device)
            self._plans[key] = None if config is None else _Plan.of(config, *key[:3])
        return self._plans[key]


class _Plan:
    """A shape's launch, worked out once. ``number`` stands for all that is fixed at compile time."""

    _numbers: ClassVar[dict[Hashable, int]] = {}

    def __init__(self, config: FewRowsConfig, block_m: int, in_features: int, tiles: int, programs: int) -> None:
        self.config, self.block_m, self.in_features = config, block_m, in_features
        self.programs = programs
        self.shared = programs != tiles
        fixed = (config, block_m, in_features, self.shared)
        self.number = self._numbers.setdefault(fixed, len(self._numbers))

    @classmethod
    def of(cls, config: FewRowsConfig, block_m: int, out_features: int, in_features: int) -> _Plan | None:
        """None where the kernel's numbers would not hold the shape."""
        tiles, blocks = -(-out_features // config.block_n), -(-in_features // config.block_k)
        programs = min(config.programs or tiles * config.split_k, tiles * blocks)
        if tiles > _MAX_TILES or (tiles * blocks + 1) * (programs + 1) >= _INT32:
            return None
        return cls(config, block_m, in_features, tiles, programs)

    def launch(
        self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor, *, accumulate: bool
    ) -> None:
        x_stride, y_stride, device, has_bias = x.stride(0), y.stride(0), x.get_device(), bias is not None
        pdl = has_pdl(device)
        partials = counters
        if self.shared:
            size = 2 * self.programs * self.block_m * self.config.block_n
            partials = torch.empty(size, dtype=torch.float32, device=x.device)
        launch_few_rows(
            (self.number, has_bias, accumulate, pdl, x.dtype, device, y.shape[1], x_stride, y_stride),
            self.programs,
            (x, weight, y, partials, x if bias is None else bias, counters),
            (x.shape[0], y.shape[1], x_stride, y_stride),
            lambda: self.options(has_bias, accumulate, pdl, x.dtype.itemsize),
        )

    def options(self, has_bias: bool, accumulate: bool, pdl: bool, itemsize: int) -> dict[str, Any]:
        config = self.config
        return {
            "K": self.in_features,
            "BLOCK_M": self.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "TRANSPOSED": config.transposed,
            "SHARED": self.shared,
            "STAGES": config.num_stages,
            "PREFETCH": config.prefetch // itemsize,
            "BIAS": has_bias,
            "ACCUMULATE": accumulate,
            "PDL": pdl,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **({"launch_pdl": True} if pdl else {}),
        }
