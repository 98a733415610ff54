"""What SGMV is measured against computes the same thing."""

from __future__ import annotations

import pytest
import torch
from punica_batch_kernels.sgmv.baselines import GatherBmm, loop
from punica_batch_kernels.sgmv.types import LoraGroup
from sgmv_cases import check, make_group, make_segments, popularity

CPU = torch.device("cpu")
RANKS = [(4, 4, 4), (2, 8, 1), (16, 16, 16), (3, 0, 9), (0, 0, 0)]


@pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "skewed"])
def test_the_baselines_add_what_sgmv_adds(kind: str) -> None:
    like = torch.empty(0, dtype=torch.float32)
    torch.manual_seed(0)
    group = make_group(RANKS, 40, (24, 16, 8), like)
    segments = make_segments([*popularity(kind, 13, 5), (-1, 2)], CPU)
    check(loop, group, segments, like)
    gather = GatherBmm(group)
    check(lambda y, x, _, segments: gather(y, x, segments), group, segments, like)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="no adapter"):
        GatherBmm(LoraGroup(8, (0, 8), [None]))
