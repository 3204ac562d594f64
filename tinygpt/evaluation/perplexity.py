"""Strided perplexity and LAMBADA, by published protocols."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tinygpt.errors import RequestError, invalid
from tinygpt.llm import LLM
from tinygpt.outputs import ContinuationScore, UseTqdm, with_bar

NUM_TOGETHER = 8  # threads, each waiting for a score; they share the engine's steps
LAST_WORD, LAST_TOKEN = "last word", "last token"


@dataclass(frozen=True)
class Perplexity:
    """Mean loss of a text's predicted tokens, in nats, and sizes of the text."""

    loss: float
    num_tokens: int
    num_words: int  # separated by white space
    num_bytes: int  # in UTF-8

    @property
    def token_perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        return _exp(self.loss * self.num_tokens / self.num_words)

    @property
    def byte_perplexity(self) -> float:
        return math.exp(self.loss * self.num_tokens / self.num_bytes)

    @property
    def bits_per_byte(self) -> float:
        return math.log2(self.byte_perplexity)


@dataclass(frozen=True)
class Window:
    """Tokens [begin, stop) of a text; the tokens from `first` on are in no window before it."""

    begin: int
    first: int
    stop: int

    @property
    def first_predicted(self) -> int:
        return max(self.first, self.begin + 1)  # nothing predicts the first token of a window

    @property
    def weight(self) -> int:
        return self.stop - self.first - 1  # of the window's mean loss, as Hugging Face has it


@dataclass(frozen=True)
class Lambada:
    """Results of one protocol. `perplexity` is exp of the mean loss over rows, of a word or of a token."""

    protocol: str
    num_rows: int
    num_correct: int
    perplexity: float

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_rows


def perplexity(llm: LLM, text: str, stride: int | None = None, use_tqdm: UseTqdm = None) -> Perplexity:
    """Compute a text's perplexity by the strided method of Hugging Face's documentation (perplexity.md).

    Windows of max_model_len tokens begin every `stride` tokens (None: a full window), and predict the tokens that no
    window before has. <|endoftext|> is that token, unless the LLM splits special tokens. Raises RequestError for a
    stride that is not from 1 to max_model_len, or a text of less than two tokens.
    """
    stride = llm.max_model_len if stride is None else stride
    check_stride(llm, stride)
    token_ids = llm.read_prompt(text).token_ids
    if len(token_ids) < 2:
        raise RequestError("the text has less than two tokens: each is predicted from the tokens before it.")
    windows = [w for w in windows_of(len(token_ids), llm.max_model_len, stride) if w.weight]

    def loss_of(window: Window) -> float:
        context = token_ids[window.begin : window.first_predicted]
        (score,) = llm.score(context, [token_ids[window.first_predicted : window.stop]])
        return -score.mean_logprob

    losses = map_together(loss_of, windows, use_tqdm, "windows")
    total = math.fsum(loss * window.weight for loss, window in zip(losses, windows, strict=True))
    loss = total / sum(window.weight for window in windows)
    return Perplexity(loss, len(token_ids), max(len(text.split()), 1), len(text.encode()))


def check_stride(llm: LLM, stride: int) -> None:
    if not 1 <= stride <= llm.max_model_len:
        raise invalid("stride", stride, f"from 1 to {llm.max_model_len}, the tokens of a window")


def windows_of(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Yield windows of `size` tokens, one every `stride`, until one reaches the end."""
    first = 0
    for begin in range(0, num_tokens, stride):
        stop = min(begin + size, num_tokens)
        yield Window(begin, first, stop)
        first = stop
        if stop == num_tokens:
            return


def lambada(llm: LLM, texts: Sequence[str], use_tqdm: UseTqdm = None) -> list[Lambada]:
    """Compute accuracy and perplexity of the end of each text, by two protocols.

    last word: as lm-evaluation-harness's lambada_openai; correct if greedy decoding writes all its tokens. last token:
    as OpenAI for GPT-2. Raises RequestError if there are no texts, or one has no beginning to read.
    """
    if not texts:
        raise RequestError("there are no rows to evaluate: give one text at least.")
    for text in texts:
        llm.read_prompt(text)  # refuses texts before any work

    def scores_of(text: str) -> tuple[ContinuationScore, ContinuationScore]:
        context, _, word = text.rpartition(" ")
        (of_word,) = llm.score(context, [f" {word}"])
        token_ids = llm.tokenizer.encode(text)
        (of_token,) = llm.score(token_ids[:-1], [token_ids[-1:]])
        return of_word, of_token

    of_words, of_tokens = zip(*map_together(scores_of, texts, use_tqdm, "rows"), strict=True)
    return [_summary(LAST_WORD, of_words), _summary(LAST_TOKEN, of_tokens)]


def map_together(function: Callable[[Any], Any], items: Sequence[Any], use_tqdm: UseTqdm, noun: str) -> Iterator[Any]:
    """Yield function(item) in order, NUM_TOGETHER at once. `noun` names the items in the bar."""
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        yield from with_bar(pool.map(function, items), len(items), use_tqdm, noun)


def _summary(protocol: str, found: Iterable[ContinuationScore]) -> Lambada:
    scores = list(found)
    loss = -math.fsum(score.cumulative_logprob for score in scores) / len(scores)
    return Lambada(protocol, len(scores), sum(score.is_greedy for score in scores), _exp(loss))


def _exp(x: float) -> float:
    """A word of very many tokens may have no finite perplexity."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
