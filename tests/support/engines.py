"""What tests of the engine share: sizes as a tuple, a sample, the batches of a model, log probabilities."""

from typing import Any

import numpy as np

from support.gate import noting
from support.paths import ROOT

SAMPLED, *OTHERS = (
    line.partition(": ")
    for line in (ROOT / "tests" / "data" / "ways.txt").read_text(encoding="utf-8").splitlines()[1:]
)
SAMPLED = eval(f"dict({SAMPLED[2]})")
# What a request may ask for, by name, and all of it that can be streamed.
WAYS = {"sampled": SAMPLED} | {name: eval(f"SAMPLED | dict({fields})") for name, _, fields in OTHERS}
PRECISIONS = {"float32": {}, "int8": {"dtype": "int8", "kv_cache_dtype": "int8"}}
STREAMED = {name: fields for name, fields in WAYS.items() if not {"num_beams", "best_of"} & {*fields}}


def sizes(max_num_seqs: int, max_num_batched_tokens: int, prefix_cache_seqs: int) -> dict[str, int]:
    return locals()


def sample_of(llm: Any, prompt: Any, *params: Any, **fields: Any) -> Any:
    """Return the first CompletionOutput of a prompt."""
    return llm.generate([prompt], *params, **fields)[0].outputs[0]


def batches_of(llm: Any, monkeypatch: Any) -> list:
    """Return a list that grows by the Batch of each pass through the model."""
    return noting(monkeypatch, llm.engine.runner, "forward", lambda batch: batch)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return float64, over the last axis."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
