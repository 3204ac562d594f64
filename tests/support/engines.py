"""What tests of the engine share: sizes as a tuple, the batches that a model was given, log probabilities."""

from typing import Any

import numpy as np


def sizes(max_num_seqs: int, max_num_batched_tokens: int, prefix_cache_seqs: int) -> dict[str, int]:
    return locals()


def batches_of(llm: Any, monkeypatch: Any) -> list:
    """Return a list that grows by the Batch of each pass through the model."""
    batches, forward = [], llm.engine.runner.forward
    monkeypatch.setattr(llm.engine.runner, "forward", lambda batch: batches.append(batch) or forward(batch))
    return batches


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return float64, over the last axis."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
