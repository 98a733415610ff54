"""What the engine knows of a row in work: its samples, what ends them, and what they become."""

from __future__ import annotations

from dataclasses import dataclass, field

from punica_batch.scheduler.sequence import Sequence
from punica_batch.text.detokenize import StopStream, finish_text
from punica_batch.text.tokenizer import Tokenizer
from punica_batch.types import Completion, FinishReason, Request, RowResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Endings:
    """What ends a sample besides its own options, and who turns its tokens into text."""

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    max_model_len: int


@dataclass(slots=True, eq=False)
class SampleState:
    """One sample in work. ``stop`` only where the row has stop strings; ``chosen`` and ``top`` with ``logprobs``."""

    sequence: Sequence
    stop: StopStream | None
    chosen: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    completion: Completion | None = None


class RowState:
    """One row in work: ``sampling.n`` samples of one prompt."""

    def __init__(self, request: Request, endings: Endings) -> None:
        self.request = request
        self._endings = endings
        self._stops_at_eos = not request.sampling.ignore_eos
        stop = request.sampling.stop
        self.samples = [
            SampleState(Sequence(request, i), StopStream(endings.tokenizer, stop) if stop else None)
            for i in range(request.sampling.n)
        ]
        self._open = len(self.samples)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a token of ``sequence`` is still to be pushed: it is this row's (not one's that had its number
        before), and no token after which it ends has been."""
        return any(sample.sequence is sequence and sample.completion is None for sample in self.samples)

    def ends_by_length(self, sequence: Sequence) -> bool:
        """Whether the sample has all the tokens that it can have, pending ones included."""
        return (
            sequence.num_output_tokens >= self.request.sampling.max_tokens
            or sequence.num_tokens >= self._endings.max_model_len
        )

    def push(self, sequence: Sequence, token_id: int) -> bool:
        """Tells of a sampled token, the sample not having ended. True when it ends with it.

        An EOS id ends it first, then a stop string, then its length.
        """
        sample = self.samples[sequence.sample]
        sequence.take(token_id)
        if self._stops_at_eos and token_id in self._endings.eos_token_ids:
            self._complete(sample, FinishReason.STOP, sequence.output_token_ids[:-1])
        elif sample.stop is not None and sample.stop.push(token_id):
            self._complete(sample, FinishReason.STOP, sequence.output_token_ids)
        elif not sequence.num_pending and self.ends_by_length(sequence):
            self._complete(sample, FinishReason.LENGTH, sequence.output_token_ids)
        return sample.completion is not None

    def add_logprobs(self, sequence: Sequence, chosen: float, top: list[tuple[int, float]]) -> None:
        """Of the token about to be pushed; ``top`` may be longer than the row asked for."""
        sample = self.samples[sequence.sample]
        sample.chosen.append(chosen)
        sample.top.append(tuple(top[: self.request.sampling.logprobs]))

    @property
    def is_done(self) -> bool:
        return self._open == 0

    def result(self, adapter_sha256: str | None) -> RowResult:
        """The row's result, once it is done."""
        completions = tuple(s.completion for s in self.samples if s.completion is not None)
        assert len(completions) == len(self.samples)
        return RowResult(self.request.row, self.request.num_prompt_tokens, completions, adapter_sha256=adapter_sha256)

    def _complete(self, sample: SampleState, reason: FinishReason, text_token_ids: list[int]) -> None:
        sampling = self.request.sampling
        logprobs = TokenLogprobs(tuple(sample.chosen), tuple(sample.top)) if sampling.logprobs is not None else None
        text = finish_text(self._endings.tokenizer, text_token_ids, sampling.stop)
        sample.completion = Completion(tuple(sample.sequence.output_token_ids), text, reason, logprobs)
        self._open -= 1
