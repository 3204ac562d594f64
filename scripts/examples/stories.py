"""Write three stories with one beginning: python stories.py "The little dog" """

import sys

from tinygpt import LLM, SamplingParams

beginning = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"
with LLM("demo") as llm:  # or a folder, or a Hub id such as "openai-community/gpt2"
    params = SamplingParams(n=3, max_tokens=60, temperature=0.8, top_k=40, seed=7)
    [output] = llm.generate(beginning, params)
for story in output.outputs:
    print(beginning + story.text, end="\n\n")
