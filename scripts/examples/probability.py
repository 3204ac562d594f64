"""Rank sentences by perplexity, and show the bits of each word as a bar: python probability.py SENTENCE ..."""

import math
import sys

from tinygpt import LLM

sentences = sys.argv[1:] or ["The cat sat on the mat.", "The cat sat on mat the.", "The mat sat on the cat."]
with LLM("demo") as llm:
    scores = llm.score("", sentences)  # after the BOS token; a first argument is a context
for sentence, score in sorted(zip(sentences, scores, strict=True), key=lambda pair: pair[1].perplexity):
    print(f"{score.cumulative_logprob:8.2f} {score.perplexity:10.2f}  {sentence}")
    for word in score.words:  # the tokens of a word are summed
        bits = -word.logprob / math.log(2)
        print(f"{word.text.strip():>20} {bits:6.2f} {'#' * round(2 * bits)}")
