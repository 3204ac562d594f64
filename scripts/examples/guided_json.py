"""Draw objects of a JSON schema, each valid: pip install "tinygpt[guided]", python guided_json.py"""

import json

from tinygpt import LLM, SamplingParams

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "animal": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}
params = [SamplingParams(max_tokens=60, temperature=1.0, seed=seed, guided_json=schema) for seed in range(3)]
with LLM("demo") as llm:
    for output in llm.generate(["The pet: "] * len(params), params):
        print(json.loads(output.outputs[0].text))
