"""What tests of the engine share: sizes as a tuple, a sample, the batches of a model, log probabilities."""

from typing import Any

import numpy as np
import pytest

from support.gate import noting
from support.paths import ROOT
from support.tables import fields
from tinygpt import LLM

GIVEN = fields((ROOT / "tests" / "data" / "ways.txt").read_text(encoding="utf-8").partition("\n")[2])
SAMPLED = GIVEN.pop("default")
# What a request may ask for, by name, and all of it that can be streamed.
WAYS = {"sampled": SAMPLED} | {name: SAMPLED | given for name, given in GIVEN.items()}
PRECISIONS = {"float32": {}, "int8": {"dtype": "int8", "kv_cache_dtype": "int8"}}
STREAMED = {name: given for name, given in WAYS.items() if not {"num_beams", "best_of"} & {*given}}


def sizes(max_num_seqs: int, max_num_batched_tokens: int, prefix_cache_seqs: int) -> dict[str, int]:
    return locals()


def opened(model: str, scope: str = "module", **options: Any) -> Any:
    """Return a fixture that opens an LLM of the demo, or else of the checkpoint in the fixture of this name."""

    @pytest.fixture(scope=scope)
    def llm(request):
        with LLM(model if model == "demo" else request.getfixturevalue(model), **options) as llm:
            yield llm

    return llm


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
