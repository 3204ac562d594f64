"""The outputs of a request, futures of them, and a bar that counts finished requests."""

import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import OfOneProcess, RequestError, TinyGPTError, invalid
from .look import bits

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One sample of a request.

    `text` is None if the checkpoint has no tokenizer: its type is the usual case's, so that programs need no check.
    """

    index: int  # among the request's n samples; the best first if best_of or num_beams chose them
    text: str
    token_ids: list[int]  # the token that ended the sample included
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # a token id, a stop string, "max_time", "loop" or "grammar"
    logprobs: list[dict[int, float]] | None  # per new token: id -> log probability, the sampled id included
    cumulative_logprob: float | None  # sum over the sampled tokens
    score: float | None  # of a beam search: the tokens' scores over length**length_penalty
    seed: int  # repeats the request
    # Of `capture`: name -> (T + new - 1, ...). The last token never ran.
    activations: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        reason = "" if self.stop_reason is None else f", stop_reason={self.stop_reason!r}"
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids=<{len(self.token_ids)} tokens>, "
            f"finish_reason={self.finish_reason!r}{reason})"
        )


class Word(NamedTuple):
    """Neighboring tokens up to the next white space, which belongs to the next word."""

    text: str
    logprob: float  # sum over its tokens
    num_tokens: int


def perplexity_of(loss: float) -> float:
    """Return exp(loss), or infinity if a word of very many tokens lost more than float64 holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class ContinuationScore:
    """The probability of a continuation. is_greedy: whether greedy decoding would write it.

    Log probabilities are natural, surprisals are in bits. Without a tokenizer, texts and results of them are None.
    """

    token_ids: list[int]
    logprobs: list[float]  # of each token
    is_greedy: bool
    tokens: list[str] | None = None  # the text that each token completes, "" within a character

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        return perplexity_of(-self.mean_logprob)

    @property
    def surprisals(self) -> list[float]:
        return [bits(logprob) for logprob in self.logprobs]

    @property
    def bits_per_byte(self) -> float | None:
        """None also for a text of no bytes."""
        num_bytes = len("".join(self.tokens or ()).encode())
        return bits(self.cumulative_logprob) / num_bytes if num_bytes else None

    @property
    def words(self) -> list[Word] | None:
        if self.tokens is None:
            return None
        groups: list[list[tuple[str, float]]] = []
        for text, logprob in zip(self.tokens, self.logprobs, strict=True):
            last = "".join(part for part, _ in groups[-1]) if groups else ""
            if not groups or (last.strip() and (text[:1].isspace() or last[-1].isspace())):
                groups.append([])
            groups[-1].append((text, logprob))
        return [Word("".join(t for t, _ in group), sum(p for _, p in group), len(group)) for group in groups]


class Logprob(NamedTuple):
    """vLLM's entry of a token. rank: from 1; None below the most probable tokens that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


def ranked(
    logprobs: Mapping[int, float], count: int, decode: Callable[[list[int]], str]
) -> dict[int, Logprob]:
    """Return vLLM's entries of an element of `logprobs` or `prompt_logprobs`.

    count: the request's number of log probabilities, -1 for all. decode: the tokenizer's.
    """
    numbered = enumerate(logprobs.items(), 1)
    return {
        i: Logprob(value, n if n <= count or count < 0 else None, decode([i])) for n, (i, value) in numbered
    }


@dataclass(frozen=True)
class Classification:
    """Labels of a prompt, K numbers and one label; or of each token, lists of T of them.

    probs: softmax; sigmoids of a single label or of a multi-label problem; the logits of a regression.
    """

    prompt_token_ids: list[int]
    logits: list
    probs: list
    label: str | list[str]  # the most probable
    num_classes: int  # K


@dataclass(frozen=True)
class RequestMetrics:
    """Moments of a request, in seconds of time.perf_counter(); None if max_time was over before.

    num_steps: tokens of the longest sample. Times include the compilation of kernels.
    """

    arrival: float
    scheduled: float | None  # its first sample got a slot of the KV cache
    first_token: float | None
    finished: float
    num_steps: int

    @property
    def queue_time(self) -> float:
        return (self.finished if self.scheduled is None else self.scheduled) - self.arrival

    @property
    def prefill_time(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.scheduled

    @property
    def decode_time(self) -> float | None:
        return None if self.first_token is None else self.finished - self.first_token

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Mean over the tokens after the first; None without them."""
        return self.decode_time / (self.num_steps - 1) if self.num_steps > 1 else None

    @property
    def time_to_finish(self) -> float:
        return self.finished - self.arrival


@dataclass(frozen=True)
class Throughput:
    """Work of an engine's steps, whose time is divided evenly among prompts' and new tokens.

    A text's first token counts as part of its prompt. Times include the compilation of kernels.
    """

    prompt_tokens: int = 0  # computed, not found in the KV cache; once for a beam search
    prompt_seconds: float = 0.0
    new_tokens: int = 0  # after the first of each text; equal samples are one text, and so is a beam search
    new_seconds: float = 0.0

    def __add__(self, other: "Throughput") -> "Throughput":
        return Throughput(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Throughput") -> "Throughput":
        return Throughput(*map(operator.sub, vars(self).values(), vars(other).values()))


class _TokenizerSlot:
    """A slot for the tokenizer by which a notebook shows an output.

    It is no field: records and pickles are without it.
    """

    __slots__ = ("tokenizer",)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True, repr=False)
class RequestOutput(_TokenizerSlot):
    """A prompt and its samples. `prompt` is None if token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    # Per token id -> log probability, None for the first; fewer, and no sum, if max_time ended the request.
    prompt_logprobs: list[dict[int, float] | None] | None
    prompt_cumulative_logprob: float | None  # sum over the tokens after the first
    num_cached_tokens: int  # of the prompt, found in the KV cache
    num_truncated_tokens: int  # of the prompt's beginning, left out by overflow

    def __repr__(self) -> str:
        prompt = None if self.prompt is None else self.prompt[:80] + "..." * (len(self.prompt) > 80)
        return (
            f"RequestOutput(prompt={prompt!r}, prompt_token_ids=<{len(self.prompt_token_ids)} tokens>, "
            f"outputs={self.outputs!r})"
        )

    def _repr_html_(self) -> str:
        """Return the texts for a notebook: with `logprobs`, tokens have colors and their candidates as titles."""
        from .look.html import boxes, marks

        tokenizer = getattr(self, "tokenizer", None)
        prompt = self.prompt
        if prompt is None:
            prompt = "" if tokenizer is None else tokenizer.decode(self.prompt_token_ids)
        samples = [
            marks(s.token_ids, s.text or str(s.token_ids), s.logprobs, tokenizer) for s in self.outputs
        ]
        return boxes(marks(self.prompt_token_ids, prompt, self.prompt_logprobs, tokenizer), samples)


class StreamChunk(NamedTuple):
    """The text that a token completes. A sample's last chunk has a finish reason.

    A tuple, which takes a third of a frozen dataclass's time: a step waits for it.
    """

    text: str
    token_id: int | None  # None if max_time ended the sample without a token
    finish_reason: Literal["stop", "length"] | None = None
    index: int = 0  # among the request's n samples
    logprobs: dict[int, float] | None = None  # of this token, whose text may come later
    # RequestOutput's: in the first chunk of sample 0.
    prompt_logprobs: list[dict[int, float] | None] | None = None
    stop_reason: int | str | None = None  # CompletionOutput's: in the last chunk
    activations: Mapping[str, Any] | None = None  # so, too


OnChunk = Callable[[StreamChunk], None]


class _Condition(threading.Condition):
    """A Condition that Ctrl-C never leaves locked: CPython interrupts functions in Python, not `with` of one in C."""

    __enter__: Any = property(lambda self: self._lock.__enter__)
    __exit__: Any = property(lambda self: self._lock.__exit__)

    def wait(self, timeout: float | None = None) -> bool:
        try:
            return super().wait(timeout)
        finally:
            if not self._is_owned():  # Ctrl-C came after the release and before `try`
                self._lock.acquire()


class ThreadFuture(OfOneProcess, Future[Result]):
    """The result of another thread, or RequestError if that thread has ended.

    owner: the class that has the thread.
    """

    _instead = "send its result()"

    def __init__(self, owner: str = "LLM"):
        super().__init__()
        self._condition = _Condition()
        self._owner = owner
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> Result:
        self.check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.check()
        return super().exception(timeout)

    def settle(self, work: Callable[[], Result]) -> None:
        if self.set_running_or_notify_cancel():
            try:
                result = work()
            except TinyGPTError as error:  # without frames, which have this future
                self.set_exception(error.with_traceback(None))
            except BaseException as error:  # raised again in the thread that waits
                self.set_exception(error)
            else:
                self.set_result(result)

    def check(self) -> None:
        if not self.done():
            check_thread(self._pid, self._owner)


def as_finished(
    futures: list[ThreadFuture[Result]],
    begin: Callable[[], None],
    return_exceptions: bool,
    kind: type[Exception],
) -> Iterator[tuple[int, Result | Exception]]:
    """Yield (index, result) of futures as they finish once `begin` is called, and cancel them in the end.

    return_exceptions: yield errors of this kind in place of results.
    """
    finished: SimpleQueue[int] = SimpleQueue()
    pid = os.getpid()
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: finished.put(i))
    try:
        begin()
        for _ in futures:
            check_thread(pid)  # again after each `yield`
            i = finished.get()
            error = futures[i].exception()
            yield i, error if return_exceptions and isinstance(error, kind) else futures[i].result()
    finally:
        for future in futures:
            future.cancel()


def until_done(
    chunks: "SimpleQueue[StreamChunk | None]", future: ThreadFuture, begin: Callable[[], None] = lambda: None
) -> Iterator[StreamChunk]:
    """Yield chunks once `begin` is called until None comes, and cancel the future in the end. Raise its error."""
    try:
        begin()
        while (chunk := chunks.get()) is not None:
            yield chunk
            future.check()
        future.result()
    finally:
        future.cancel()


def has_threads(pid: int) -> bool:
    """Return whether the threads of the process `pid` run here: not in a forked child, nor when Python ends."""
    return pid == os.getpid() and not sys.is_finalizing()


def check_thread(pid: int, owner: str = "LLM") -> None:
    if pid != os.getpid():
        raise RequestError(
            f"this {owner} belongs to the process that was forked: make a new one in the child."
        )
    if not has_threads(pid):
        raise RequestError(f"Python is ending, and the thread of this {owner} has ended: use it before.")


UseTqdm = bool | Callable[..., Iterable] | None


def with_bar(items: Iterable, total: int, use_tqdm: UseTqdm, noun: str = "prompts") -> Iterable[Any]:
    """Return the items, counted on stderr as they come; `LLM.generate` explains use_tqdm."""
    if not (use_tqdm is None or isinstance(use_tqdm, bool) or callable(use_tqdm)):
        raise invalid("use_tqdm", use_tqdm, "None, True, False or a function like tqdm")
    if use_tqdm is None:
        is_shown = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
        use_tqdm = total > 1 and is_shown
    if not use_tqdm:
        return items
    if use_tqdm is True:
        from tqdm.auto import tqdm as use_tqdm
    return use_tqdm(items, total=total, unit=f" {noun}")


def in_order(finished: Iterable[tuple[int, Result]], total: int, use_tqdm: UseTqdm) -> list[Result]:
    """Return results by their indices, with a bar."""
    results = dict(with_bar(finished, total, use_tqdm))
    return [results[i] for i in sorted(results)]
