"""ROUGE of summaries that a model writes, by the protocol of FasterTransformer's summarization example.

An article and "TL;DR:" are the prompt, its last 923 tokens where it is longer; up to 100 tokens are drawn from the two
most probable ones each, and of these the first four sentences count. The scores are those of the package `rouge-score`
(Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004): F-measures in percent, their means over all rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinygpt.errors import RequestError, how_to_install
from tinygpt.evaluation.texts import read_text
from tinygpt.llm import LLM
from tinygpt.outputs import UseTqdm
from tinygpt.sampling_params import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, SENTENCES, SEED = 923, 100, 4, 5
KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
SUMMARIES = ("highlights", "summary")  # what CNN/DailyMail calls a summary, and others


@dataclass(frozen=True)
class Article:
    text: str
    summary: str


def read_articles(name: str, path: str | Path) -> list[Article]:
    """The rows of a JSONL file. RequestError names the first line that is none."""
    lines = enumerate(read_text(name, path).split("\n"), 1)
    return [_article(line, f"line {number} of {name} {path}") for number, line in lines if line.strip()]


def _article(line: str, place: str) -> Article:
    try:
        row = json.loads(line)
        found = [row[field] for field in SUMMARIES if field in row]
        if isinstance(row["article"], str) and found and isinstance(found[0], str) and found[0].strip():
            return Article(row["article"], found[0])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise RequestError(f'{place} is no article with a summary: give {{"article": ..., "highlights": ...}}.')


def prompt_of(article: str) -> str:
    return (article + " TL;DR: ").strip().replace(" n't", "n't")


def first_sentences(text: str) -> str:
    return ".".join(text.split(".")[:SENTENCES]) + "."


def summarize(llm: LLM, articles: Sequence[Article], use_tqdm: UseTqdm = None) -> list[str]:
    """A summary of each. RequestError for a model without room for NEW_TOKENS. use_tqdm: as for LLM.generate."""
    room = min(PROMPT_TOKENS, llm.max_model_len - NEW_TOKENS)
    if room < 1:
        raise RequestError(f"summaries take {NEW_TOKENS} tokens and the model has {llm.max_model_len} positions.")
    prompts = [llm.tokenizer.encode(prompt_of(article.text))[-room:] for article in articles]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_k=2, seed=SEED)
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return [first_sentences(output.outputs[0].text) for output in outputs]


def rouge(summaries: Sequence[str], articles: Sequence[Article]) -> dict[str, float]:
    """The mean of each of KINDS, in percent. RequestError where the package is not installed."""
    scorer = new_scorer()
    totals = dict.fromkeys(KINDS, 0.0)
    for summary, article in zip(summaries, articles, strict=True):
        for kind, score in scorer.score(article.summary, summary).items():
            totals[kind] += 100 * score.fmeasure / len(articles)
    return totals


def new_scorer():
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise RequestError(f"ROUGE needs the package rouge-score ({error}): {how_to_install('eval')}.") from error
    return RougeScorer(list(KINDS), use_stemmer=True)
