"""ROUGE of summaries that a model writes, by the protocol of FasterTransformer's summarization example.

A prompt is an article and "TL;DR:", at most its last 923 tokens. Up to 100 tokens are sampled with top-k 2, and the
first four sentences count. Scores are those of the package `rouge-score` (Lin, "ROUGE: A Package for Automatic
Evaluation of Summaries", 2004): F-measures in percent, averaged over all rows.
"""

from collections.abc import Sequence
from typing import Any

from tinygpt.errors import RequestError, how_to_install
from tinygpt.evaluation.texts import Article
from tinygpt.llm import LLM
from tinygpt.outputs import UseTqdm
from tinygpt.sampling_params import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, SENTENCES, SEED = 923, 100, 4, 5
KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def prompt_of(article: str) -> str:
    return (article + " TL;DR: ").strip().replace(" n't", "n't")


def first_sentences(text: str) -> str:
    return ".".join(text.split(".")[:SENTENCES]) + "."


def summarize(llm: LLM, articles: Sequence[Article], use_tqdm: UseTqdm = None) -> list[str]:
    """Return a summary of each article. Raise RequestError for a model without room for NEW_TOKENS."""
    room = min(PROMPT_TOKENS, llm.max_model_len - NEW_TOKENS)
    if room < 1:
        raise RequestError(f"summaries take {NEW_TOKENS} tokens and the model has {llm.max_model_len} positions.")
    prompts = [llm.tokenizer.encode(prompt_of(article.text))[-room:] for article in articles]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_k=2, seed=SEED)
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return [first_sentences(output.outputs[0].text) for output in outputs]


def rouge(summaries: Sequence[str], articles: Sequence[Article]) -> dict[str, float]:
    """Return the mean of each of KINDS, in percent."""
    scorer, totals = new_scorer(), dict.fromkeys(KINDS, 0.0)
    for summary, article in zip(summaries, articles, strict=True):
        for kind, score in scorer.score(article.summary, summary).items():
            totals[kind] += 100 * score.fmeasure / len(articles)
    return totals


def new_scorer() -> Any:
    """Return the package's scorer. Raise RequestError if it is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise RequestError(f"ROUGE needs the package rouge-score ({error}): {how_to_install('eval')}.") from error
    return RougeScorer(list(KINDS), use_stemmer=True)
