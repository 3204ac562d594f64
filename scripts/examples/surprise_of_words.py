"""Show how many bits each word surprises the model, as a bar: python surprise_of_words.py TEXT"""

import math
import sys

from tinygpt import LLM

text = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time there was a dragon who paid taxes."
with LLM("demo") as llm:
    [score] = llm.score("", [text])
for word in score.words:  # the tokens of a word are summed
    bits = -word.logprob / math.log(2)
    print(f"{word.text.strip():>12} {bits:6.2f} {'#' * round(2 * bits)}")
