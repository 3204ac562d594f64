"""Throughput: how many tokens the steps have read and made, and in how many seconds."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinygpt.engine.scheduler import Chunk
from tinygpt.kernels.compiling import CompileClock
from tinygpt.request.sequence import Sequence


@dataclass(frozen=True)
class Throughput:
    """Work of an engine's steps. Seconds in which kernels were compiled are in neither of the two times.

    The first new token comes with the reading of its prompt. Where a step reads prompts and goes on with other texts,
    its time is shared out evenly among its tokens.
    """

    prompt_tokens: int = 0  # that were computed, once for a beam search: not those found in the KV cache
    prompt_seconds: float = 0.0
    new_tokens: int = 0  # after the first of each text; equal samples are one text, and so is a beam search
    new_seconds: float = 0.0

    def __add__(self, other: "Throughput") -> "Throughput":
        return Throughput(*(mine + others for mine, others in zip(*map(_values, (self, other)), strict=True)))

    def __sub__(self, other: "Throughput") -> "Throughput":
        return Throughput(*(mine - others for mine, others in zip(*map(_values, (self, other)), strict=True)))


def side_by_side(works: Collection[Throughput]) -> Throughput:
    """Of engines that ran at once: the tokens of all, in the seconds of the one that took longest."""
    return Throughput(
        sum(work.prompt_tokens for work in works),
        max(work.prompt_seconds for work in works),
        sum(work.new_tokens for work in works),
        max(work.new_seconds for work in works),
    )


class Meter:
    """Adds up the steps of an engine."""

    def __init__(self, compile_clock: CompileClock):
        self.total = Throughput()
        self._compile_clock = compile_clock

    @contextmanager
    def measured(self, chunks: list[Chunk]) -> Iterator[None]:
        """Measure the step of these chunks. One that is interrupted is taken again, and counts once."""
        started = time.perf_counter()
        read = sum(chunk.count for chunk in chunks if _is_in_prompt(chunk.sequence))
        sequences = [chunk.sequence for chunk in chunks]
        searches = {id(sequence.beams) for sequence in sequences if sequence.beams and sequence.new_token_ids}
        texts = [sequence for sequence in sequences if not sequence.beams]
        before = _num_after_first(texts)
        yield
        made = len(searches) + _num_after_first(texts) - before
        seconds, share = self._compile_clock.since(started), read / ((read + made) or 1)
        self.total += Throughput(read, share * seconds, made, (1 - share) * seconds)


def _is_in_prompt(sequence: Sequence) -> bool:
    is_first = sequence.beams is None or sequence is sequence.beams.first
    return is_first and not sequence.new_token_ids


def _num_after_first(sequences: list[Sequence]) -> int:
    return sum(max(len(sequence.new_token_ids) - 1, 0) for sequence in sequences)


def _values(throughput: Throughput) -> tuple[int, float, int, float]:
    return throughput.prompt_tokens, throughput.prompt_seconds, throughput.new_tokens, throughput.new_seconds
