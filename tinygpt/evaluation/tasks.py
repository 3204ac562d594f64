"""Strided perplexity, LAMBADA and ROUGE, by published protocols."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError, how_to_install, invalid
from ..llm import LLM
from ..outputs import ContinuationScore, UseTqdm, perplexity_of, with_bar
from ..sampling_params import SamplingParams

NUM_TOGETHER = 8  # threads that share the engine's steps
# ROUGE as FasterTransformer's summarization example.
PROMPT_TOKENS = 923
NEW_TOKENS = 100
SENTENCES = 4
SEED = 5
SUMMARIES = ("highlights", "summary")  # fields of a row; the first is CNN/DailyMail's
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass(frozen=True)
class Article:
    text: str
    summary: str


@dataclass(frozen=True)
class Perplexity:
    """Mean loss of a text's predicted tokens, in nats."""

    loss: float
    num_tokens: int
    num_words: int  # separated by white space
    num_bytes: int  # in UTF-8

    @property
    def token_perplexity(self) -> float:
        return perplexity_of(self.loss)

    @property
    def word_perplexity(self) -> float:
        return perplexity_of(self.loss * self.num_tokens / self.num_words)

    @property
    def byte_perplexity(self) -> float:
        return perplexity_of(self.loss * self.num_tokens / self.num_bytes)

    @property
    def bits_per_byte(self) -> float:
        return math.log2(self.byte_perplexity)


@dataclass(frozen=True)
class Lambada:
    protocol: str
    num_rows: int
    num_correct: int
    perplexity: float  # exp of the mean loss of a word or token

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_rows


def perplexity(llm: LLM, text: str, stride: int | None = None, use_tqdm: UseTqdm = None) -> Perplexity:
    """Compute perplexity by Hugging Face's strided method (perplexity.md). Raise RequestError for a wrong stride.

    Windows of max_model_len tokens begin every `stride` tokens (None: a full window).
    """
    stride = llm.max_model_len if stride is None else stride
    check_stride(llm, stride)
    token_ids = llm.read_prompt(text).token_ids
    if len(token_ids) < 2:
        raise RequestError("the text has less than two tokens: each is predicted from the tokens before it.")
    windows = [window for window in _windows(len(token_ids), llm.max_model_len, stride) if window[-1]]

    def weighted_loss(window: tuple[int, int, int, int]) -> float:
        begin, first, stop, weight = window
        (score,) = llm.score(token_ids[begin:first], [token_ids[first:stop]])
        return -score.mean_logprob * weight

    total = math.fsum(map_together(weighted_loss, windows, use_tqdm, "windows"))
    loss = total / sum(weight for *_, weight in windows)
    return Perplexity(loss, len(token_ids), max(len(text.split()), 1), len(text.encode()))


def check_stride(llm: LLM, stride: int) -> None:
    if not 1 <= stride <= llm.max_model_len:
        raise invalid("stride", stride, f"from 1 to {llm.max_model_len}, the tokens of a window")


def _windows(num_tokens: int, size: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield a window's begin, first predicted token, end, and weight in the mean, as in Hugging Face's page."""
    first = 0
    for begin in range(0, num_tokens, stride):
        stop = min(begin + size, num_tokens)
        yield begin, max(first, begin + 1), stop, stop - first - 1  # the first token of a text has no context
        first = stop
        if stop == num_tokens:
            return


def lambada(llm: LLM, texts: Sequence[str], use_tqdm: UseTqdm = None) -> list[Lambada]:
    """Compute accuracy and perplexity of the end of each text, by two protocols.

    last word: lm-evaluation-harness's lambada_openai, correct if all its tokens are greedy. last token: OpenAI's for
    GPT-2.
    """
    if not texts:
        raise RequestError("there are no rows to evaluate.")
    for text in texts:
        llm.read_prompt(text)  # refuses before any work

    def scores_of(text: str) -> tuple[ContinuationScore, ContinuationScore]:
        context, _, word = text.rpartition(" ")
        (of_word,) = llm.score(context, [f" {word}"])
        token_ids = llm.tokenizer.encode(text)
        (of_token,) = llm.score(token_ids[:-1], [token_ids[-1:]])
        return of_word, of_token

    by_protocol = zip(*map_together(scores_of, texts, use_tqdm, "rows"), strict=True)
    return [*map(_lambada, ("last word", "last token"), by_protocol)]


def _lambada(protocol: str, scores: Sequence[ContinuationScore]) -> Lambada:
    loss = -math.fsum(score.cumulative_logprob for score in scores) / len(scores)
    num_correct = sum(score.is_greedy for score in scores)
    return Lambada(protocol, len(scores), num_correct, perplexity_of(loss))


def map_together(
    function: Callable[[Any], Any], items: Sequence[Any], use_tqdm: UseTqdm, noun: str
) -> Iterator[Any]:
    """Yield in order, NUM_TOGETHER at once."""
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        yield from with_bar(pool.map(function, items), len(items), use_tqdm, noun)


def prompt_of(article: str) -> str:
    return (article + " TL;DR: ").strip().replace(" n't", "n't")


def first_sentences(text: str) -> str:
    return ".".join(text.split(".")[:SENTENCES]) + "."


def summarize(llm: LLM, articles: Sequence[Article], use_tqdm: UseTqdm = None) -> list[str]:
    """Return a summary of each article. Raise RequestError without room for NEW_TOKENS."""
    room = min(PROMPT_TOKENS, llm.max_model_len - NEW_TOKENS)
    if room < 1:
        raise RequestError(
            f"summaries take {NEW_TOKENS} tokens and the model has {llm.max_model_len} positions."
        )
    prompts = [llm.tokenizer.encode(prompt_of(article.text))[-room:] for article in articles]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_k=2, seed=SEED)
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return [first_sentences(output.outputs[0].text) for output in outputs]


def rouge(summaries: Sequence[str], articles: Sequence[Article]) -> dict[str, float]:
    """Return the mean F-measure of each of ROUGE_KINDS in percent (Lin, 2004)."""
    scorer = new_scorer()
    totals = dict.fromkeys(ROUGE_KINDS, 0.0)
    for summary, article in zip(summaries, articles, strict=True):
        for kind, score in scorer.score(article.summary, summary).items():
            totals[kind] += 100 * score.fmeasure / len(articles)
    return totals


def new_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise RequestError(
            f"ROUGE needs the package rouge-score ({error}): {how_to_install('eval')}."
        ) from error
    return RougeScorer(list(ROUGE_KINDS), use_stemmer=True)


def read_rows(name: str, lines: str) -> list[str]:
    """Return the texts of JSONL. Raise RequestError, which calls it `name`, for a text of less than two words."""
    rows = []
    for row, place in _rows(name, lines):
        text = row.get("text")
        if not isinstance(text, str) or len(text.split()) < 2:
            raise RequestError(
                f'{place} is not a row of LAMBADA: give {{"text": ...}} with at least two words.'
            )
        rows.append(text)
    return rows


def read_articles(name: str, lines: str) -> list[Article]:
    """Return the articles of JSONL. Raise RequestError, as `read_rows`, without an article and its summary."""
    articles = []
    for row, place in _rows(name, lines):
        text = row.get("article")
        summary = next((row[field] for field in SUMMARIES if field in row), None)
        if not isinstance(text, str) or not isinstance(summary, str) or not summary.strip():
            raise RequestError(
                f'{place} is no article with a summary: give {{"article": ..., "highlights": ...}}.'
            )
        articles.append(Article(text, summary))
    return articles


def _rows(name: str, lines: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the object of each line, {} for another value, and the place that errors name."""
    for number, line in enumerate(lines.split("\n"), 1):
        if line.strip():
            row = None
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
            yield (row if isinstance(row, dict) else {}), f"line {number} of {name}"
