"""Quality in numbers: strided perplexity and LAMBADA, by the protocols whose results others publish."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tinygpt.errors import RequestError
from tinygpt.llm import LLM
from tinygpt.outputs import ContinuationScore, UseTqdm, with_bar

# Each thread waits for the score of one item, all by the same steps: more at once than this fill these no better.
NUM_TOGETHER = 8
LAST_WORD, LAST_TOKEN = "last word", "last token"


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text. `loss` is in nats, the mean over the tokens that were predicted."""

    loss: float
    num_tokens: int
    num_words: int  # what white space separates
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
    """Tokens [begin, stop) of a text, which the model reads at once; those from `first` on have not been seen before.

    The very first token of a window has nothing before it to be predicted from.
    """

    begin: int
    first: int
    stop: int

    @property
    def first_predicted(self) -> int:
        return max(self.first, self.begin + 1)

    @property
    def weight(self) -> int:
        """Of the mean of the window's losses: Hugging Face's, one less than the tokens that have not been seen."""
        return self.stop - self.first - 1


@dataclass(frozen=True)
class Lambada:
    """Results by one protocol. `perplexity` is exp of the mean loss over rows, of a word or of a token."""

    protocol: str
    num_rows: int
    num_correct: int
    perplexity: float

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_rows


def perplexity(llm: LLM, text: str, stride: int | None = None, use_tqdm: UseTqdm = None) -> Perplexity:
    """Perplexity of a text by the strided method of Hugging Face's documentation (perplexity.md).

    Windows of llm.max_model_len tokens begin every `stride` tokens, and each predicts the tokens that no window before
    has seen; None is a full window, without overlap. As there, windows of n new tokens count n - 1 times, and
    <|endoftext|> between documents is that token, unless the LLM splits special tokens.
    use_tqdm: as for LLM.generate, of windows.
    Raises RequestError if the stride is no number from 1 to max_model_len, or the text has less than two tokens.
    """
    stride = llm.max_model_len if stride is None else stride
    check_stride(llm, stride)
    token_ids = llm.read_prompt(text).token_ids
    if len(token_ids) < 2:
        raise RequestError("the text has less than two tokens: give more, as each is predicted from those before it.")
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
    """RequestError if windows that begin every `stride` tokens would leave some out."""
    if not 1 <= stride <= llm.max_model_len:
        raise RequestError(
            f"stride is {stride} and a window has {llm.max_model_len} tokens: give a number from 1 to that many, so "
            "that no token is left out."
        )


def windows_of(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows of `size` tokens, one every `stride`, until one reaches the end."""
    first = 0
    for begin in range(0, num_tokens, stride):
        stop = min(begin + size, num_tokens)
        yield Window(begin, first, stop)
        first = stop
        if stop == num_tokens:
            return


def lambada(llm: LLM, texts: Sequence[str], use_tqdm: UseTqdm = None) -> list[Lambada]:
    """How often, and how surely, the model foresees what ends each text; by each protocol.

    last word: what follows the last space, as lm-evaluation-harness's lambada_openai has it. Correct where greedy
    decoding would write all its tokens.
    last token: of the text's tokens, as OpenAI's GPT-2 had it. Its perplexity is that of a token, not of a word.
    use_tqdm: as for LLM.generate, of texts.
    Raises RequestError if there are no texts, or one has no beginning to read or no end to foresee.
    """
    if not texts:
        raise RequestError("there are no rows to evaluate: give one text at least.")
    for text in texts:
        llm.read_prompt(text)  # before any work: what the model cannot read is refused

    def scores_of(text: str) -> tuple[ContinuationScore, ContinuationScore]:
        context, _, word = text.rpartition(" ")
        (of_word,) = llm.score(context, [f" {word}"])
        token_ids = llm.tokenizer.encode(text)
        (of_token,) = llm.score(token_ids[:-1], [token_ids[-1:]])
        return of_word, of_token

    of_words, of_tokens = zip(*map_together(scores_of, texts, use_tqdm, "rows"), strict=True)
    return [_summary(LAST_WORD, of_words), _summary(LAST_TOKEN, of_tokens)]


def map_together(function: Callable[[Any], Any], items: Sequence[Any], use_tqdm: UseTqdm, noun: str) -> Iterator[Any]:
    """function(item) of each, in order. Several run at once, so that what they ask of an LLM shares its steps.

    use_tqdm: as for LLM.generate, of items, which are called `noun`.
    """
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        yield from with_bar(pool.map(function, items), len(items), use_tqdm, noun)


def _summary(protocol: str, scores: Iterable[ContinuationScore]) -> Lambada:
    scores = list(scores)
    loss = -math.fsum(score.cumulative_logprob for score in scores) / len(scores)
    return Lambada(protocol, len(scores), sum(score.is_greedy for score in scores), _exp(loss))


def _exp(x: float) -> float:
    """A word of very many tokens may have no finite perplexity."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
