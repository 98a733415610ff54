"""Choosing tokens: greedy, or Gumbel-max over Philox noise under temperature, min-p, top-k and top-p.

Semantics (names, order and meanings are vLLM's)::

    temperature 0   token = argmax(logits), the lowest id of equals
    temperature T   s = logits / T
                    min-p   drop tokens with p < min_p * max p
                    top-k   drop tokens below the k-th largest s
                    top-p   drop tokens before which (likeliest first) the rest's mass has reached top_p
                    token = argmax(s + gumbel(Philox(stream key; token // 4, position)[token % 4]))

Equals of the last token kept are kept too, so nothing depends on how a device orders equal numbers. All of it is
float64, so that devices agree on s and on the noise to far below the gaps that decide.

On a GPU the kernels of ``punica_batch_kernels.sampling`` do the same without a wait: ``greedy`` can be captured in a
CUDA graph, and what ``sample`` enqueues takes its parameters in one asynchronous copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from punica_batch_kernels.sampling.types import DrawParams
from torch import Tensor

from punica_batch.engine.philox import GUMBEL_SPAN, OWN_SEED, RACE_RATIO, ROW_NUMBER, gumbel, philox4x32, stream_keys
from punica_batch.types import SamplingParams

# vLLM's floor: positive temperatures below it are taken as it.
MIN_TEMPERATURE = 0.01
# Rows with temperature are worked in chunks of at most this many logits: what stays in a core's cache.
_CHUNK_LOGITS = 2**18
# Much more than float32 gets wrong of a race's times.
_ROUNDING = 1.0001
_LOW = 0xFFFFFFFF
# The likeliest tokens that top-p looks at before it sorts the whole vocabulary.
_NUCLEUS_WIDTH = 1024


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How a step's sampled rows choose their tokens, on the host.

    ``drawn`` int64 [D]: which rows have temperature > 0. The other arrays are [D], one entry for each of those:
    ``temperature``, ``min_p``, ``top_p`` float64; ``top_k`` int64 (0: all); ``keys`` int64 (64 bits), the rows' random
    streams; ``positions`` int64, where the token will stand in its sequence. ``logprob_rows`` int64 [L] are the rows
    that want log-probabilities, of the ``num_top`` likeliest at most.
    """

    drawn: NDArray[np.int64]
    temperature: NDArray[np.float64]
    min_p: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    keys: NDArray[np.int64]
    positions: NDArray[np.int64]
    logprob_rows: NDArray[np.int64]
    num_top: int

    @classmethod
    def build(
        cls,
        params: SequenceOf[SamplingParams],
        rows: SequenceOf[int],
        samples: SequenceOf[int],
        positions: SequenceOf[int],
        job_seed: int,
    ) -> SamplingBatch:
        """One entry a sampled row: its parameters, its row number in the input, its sample number, its position."""
        drawn = [i for i, p in enumerate(params) if p.temperature > 0]
        wanting = [i for i, p in enumerate(params) if p.logprobs is not None]
        chosen = [params[i] for i in drawn]
        own = [p.seed is not None for p in chosen]
        values = [rows[i] if p.seed is None else p.seed for i, p in zip(drawn, chosen, strict=True)]
        return cls(
            drawn=np.array(drawn, dtype=np.int64),
            temperature=np.array([max(p.temperature, MIN_TEMPERATURE) for p in chosen], dtype=np.float64),
            min_p=np.array([p.min_p for p in chosen], dtype=np.float64),
            top_p=np.array([p.top_p for p in chosen], dtype=np.float64),
            top_k=np.array([max(p.top_k, 0) for p in chosen], dtype=np.int64),
            keys=stream_keys(
                job_seed,
                np.where(own, OWN_SEED, ROW_NUMBER).astype(np.uint64),
                np.array([v & (2**64 - 1) for v in values], dtype=np.uint64),
                np.array([samples[i] for i in drawn], dtype=np.uint64),
            ).view(np.int64),
            positions=np.array([positions[i] for i in drawn], dtype=np.int64),
            logprob_rows=np.array(wanting, dtype=np.int64),
            num_top=max((params[i].logprobs or 0 for i in wanting), default=0),
        )

    @property
    def greedy_only(self) -> bool:
        """Whether ``greedy`` alone answers for these rows."""
        return not len(self.drawn) and not len(self.logprob_rows)

    def to(self, device: torch.device) -> DeviceSampling:
        """One copy from pinned memory, which nothing waits for."""
        numbers = (self.drawn, self.top_k, self.keys, self.positions)
        shares = (self.temperature, self.min_p, self.top_p)
        words = np.concatenate([*numbers, *(s.view(np.int64) for s in shares), self.logprob_rows])
        # from a cache of pinned blocks, which keeps this one until the copy has run
        host = torch.empty(len(words), dtype=torch.int64, pin_memory=device.type == "cuda")
        host.numpy()[:] = words
        d = len(self.drawn)
        parts = host.to(device, non_blocking=True).split_with_sizes([4 * d, 3 * d, len(self.logprob_rows)])
        params = DrawParams(parts[0].view(4, d), parts[1].view(torch.float64).view(3, d))
        return DeviceSampling(params, parts[2], self.num_top)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSampling:
    """A ``SamplingBatch`` on the device. ``logprob_rows`` int64 [L]."""

    drawn: DrawParams
    logprob_rows: Tensor
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """Tensors on the logits' device. ``token_ids`` int64 [S]; ``finite`` bool [S]: False where logits were NaN or Inf.

    ``chosen_logprobs`` float32 [L], ``top_ids`` int64 [L, num_top], ``top_logprobs`` float32 [L, num_top] (likeliest
    first) are those of ``SamplingBatch.logprob_rows``; None without such rows.
    """

    token_ids: Tensor
    finite: Tensor
    chosen_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``token_ids`` int64 [S] and ``finite`` bool [S] of rows without temperature, as ``sample`` gives them.

    ``logits`` [S, V], float32 or half precision. On a GPU two launches, which a CUDA graph can capture.
    """
    if logits.is_cuda:
        from punica_batch_kernels.sampling import triton_backend

        return triton_backend.greedy(logits)[:2]
    largest, token_ids = logits.max(dim=-1)
    return token_ids, torch.isfinite(largest)


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """Choose one token a row. ``logits`` [S, V], float32 or half precision, not modified; on a GPU nothing waits.

    Rows without temperature cost an argmax.
    """
    if logits.is_cuda:
        return sample_on_device(logits, batch.to(logits.device))
    token_ids, finite = greedy(logits)
    chunk = max(1, _CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(batch.drawn), chunk):
        part = slice(start, start + chunk)
        rows = torch.from_numpy(batch.drawn[part])
        token_ids[rows] = _draw(logits[rows].float(), batch, part)
    return _with_logprobs(logits, token_ids, finite, torch.from_numpy(batch.logprob_rows), batch.num_top)


def warm_up(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles what ``greedy`` and ``sample`` launch on a GPU for logits like these, so that no step has to."""
    if device.type == "cuda":
        batch = SamplingBatch.build([SamplingParams(temperature=1.0)], [0], [0], [0], 0)
        sample(torch.zeros(1, vocab_size, dtype=dtype, device=device), batch)


def sample_on_device(logits: Tensor, sampling: DeviceSampling) -> SamplerOutput:
    """As ``sample`` on a GPU, with parameters that are there already."""
    from punica_batch_kernels.sampling import triton_backend

    found = triton_backend.greedy(logits)
    triton_backend.draw(logits, found, sampling.drawn, span=GUMBEL_SPAN)
    return _with_logprobs(logits, found.token_ids, found.finite, sampling.logprob_rows, sampling.num_top)


def _with_logprobs(logits: Tensor, token_ids: Tensor, finite: Tensor, rows: Tensor, num_top: int) -> SamplerOutput:
    if not len(rows):
        return SamplerOutput(token_ids, finite)
    # vLLM's default "raw_logprobs": of the model's own distribution, before temperature and the filters.
    logprobs = torch.log_softmax(logits.index_select(0, rows), dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids.index_select(0, rows).unsqueeze(1)).squeeze(1)
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return SamplerOutput(token_ids, finite, chosen, top.indices, top.values)


def _draw(logits: Tensor, batch: SamplingBatch, part: slice) -> Tensor:
    """Tokens int64 [D] of the drawn rows ``part``; ``logits`` float32 [D, V] is overwritten."""
    device = logits.device

    def column(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[part])).to(device).unsqueeze(1)

    # NaN and Inf rows are reported by `finite`; here they must only not disturb the others.
    logits.nan_to_num_(nan=0.0)
    temperature = column(batch.temperature)
    top = logits.amax(dim=1, keepdim=True).double()
    least = top + temperature * torch.log(column(batch.min_p))  # -inf where min_p is 0
    if (batch.top_k[part] > 0).any():
        least = torch.maximum(least, _top_k_least(logits, batch.top_k[part]))
    if (batch.top_p[part] < 1).any():
        least = torch.maximum(least, _top_p_least(logits, least, top, temperature, column(batch.top_p)))
    # No noise lifts a token from further down past the likeliest one: exact, and most of a vocabulary needs none.
    least = torch.maximum(least, top - GUMBEL_SPAN * temperature)
    return _race(logits, logits >= _round_up(least), top, temperature, column(batch.keys), column(batch.positions))


def _round_up(bound: Tensor) -> Tensor:
    """The least float32 not below each float64: the same comparisons, without widening what is compared."""
    narrow = bound.float()
    return torch.where(narrow.double() < bound, torch.nextafter(narrow, torch.full_like(narrow, math.inf)), narrow)


def _top_k_least(logits: Tensor, top_k: NDArray[np.int64]) -> Tensor:
    """The k-th largest logit of each row, float64 [D, 1]; -inf where k is 0."""
    bounded = np.minimum(top_k, logits.shape[1])
    largest = logits.topk(int(bounded.max()), dim=1).values
    index = torch.from_numpy(np.maximum(bounded, 1) - 1).to(logits.device).unsqueeze(1)
    unbounded = torch.from_numpy(bounded == 0).to(logits.device).unsqueeze(1)
    return largest.gather(1, index).double().masked_fill_(unbounded, -math.inf)


def _top_p_least(logits: Tensor, least: Tensor, top: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """The least logit of the nucleus among those not below ``least``, float64 [D, 1]; -inf where ``top_p`` is 1."""

    def mass(values: Tensor) -> Tensor:
        wide = values.double()
        return torch.exp((wide - top) / temperature).masked_fill_(wide < least, 0.0)

    needed = top_p * mass(logits).sum(dim=1, keepdim=True)
    vocab = logits.shape[1]
    for width in (min(_NUCLEUS_WIDTH, vocab), vocab):
        largest = logits.topk(width, dim=1).values
        masses = mass(largest)
        before = masses.cumsum(dim=1) - masses
        if width == vocab or bool((before[:, -1:] >= needed).logical_or_(top_p >= 1).all()):
            break
    kept = (before < needed) & (masses > 0)
    kept[:, 0] = True
    nucleus = largest.gather(1, kept.sum(dim=1, keepdim=True) - 1).double()
    return nucleus.masked_fill_(top_p >= 1, -math.inf)


def _race(logits: Tensor, kept: Tensor, top: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """argmax over the kept tokens of s + gumbel, s = (logit - top) / temperature; int64 [D].

    With u the uniform of a token, s + gumbel is the largest where -log(u) / exp(s) is the least (an exponential race),
    and 1 - u <= -log(u) <= ``RACE_RATIO`` * (1 - u). So (1 - u) / exp(s), one float32 exp, leaves a handful of tokens
    in the race, and only theirs are computed exactly.
    """
    kept = _grouped(kept, False)
    row, group = torch.nonzero(kept.any(dim=2), as_tuple=True)
    key, zero = keys[:, 0][row], torch.zeros((), dtype=torch.int64, device=logits.device)
    key_halves, counter = (key & _LOW, (key >> 32) & _LOW), (group, positions[:, 0][row], zero, zero)
    words = torch.stack(philox4x32(key_halves, counter), dim=1)  # [K groups, 4]
    scores = (_grouped(logits, 0.0)[row, group].double() - top[row]) / temperature[row]
    scores.masked_fill_(~kept[row, group], -math.inf)
    times = (_LOW - words).float().add_(0.5).mul_(2.0**-32).div_(scores.float().exp_())
    infinite = torch.full((logits.shape[0],), math.inf, device=logits.device)
    first = infinite.scatter_reduce(0, row, times.amin(dim=1), "amin")
    place, lane = torch.nonzero(times <= (RACE_RATIO * _ROUNDING) * first[row].unsqueeze(1), as_tuple=True)
    exact = scores[place, lane] + gumbel(words[place, lane])
    row, token = row[place], 4 * group[place] + lane
    best = (-infinite).double().scatter_reduce(0, row, exact, "amax")
    won = exact == best[row]
    return torch.full_like(keys[:, 0], logits.shape[1]).scatter_reduce(0, row[won], token[won], "amin")


def _grouped(values: Tensor, fill: float) -> Tensor:
    """[D, V] as [D, groups of four, 4], filled up."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % 4), value=fill).view(values.shape[0], -1, 4)
