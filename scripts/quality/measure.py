"""Each dtype of a checkpoint beside float32, over windows of a text or of random tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tqdm import tqdm

from tinygpt import LLM
from tinygpt.weights.config import DTYPES

INT8_CACHE = "int8 KV cache"  # beside float32 weights: the name of its results


@dataclass
class Quality:
    """One dtype beside float32, summed up over windows."""

    loss: float = 0.0  # nats, over `predictions`
    predictions: int = 0
    kl: float = 0.0
    difference: float = 0.0  # of logits, over all positions and the vocabulary
    largest: float = 0.0
    agreements: int = 0
    positions: int = 0

    def add(self, logits: np.ndarray, exact: np.ndarray, token_ids: list[int]) -> None:
        """logits and float32's (T, V), of the tokens (T,) of one window."""
        shares, exact_shares = log_softmax(logits), log_softmax(exact)  # (T, V)
        self.loss -= shares[np.arange(len(token_ids) - 1), token_ids[1:]].sum(dtype=float)
        self.predictions += len(token_ids) - 1
        self.kl += (np.exp(exact_shares) * (exact_shares - shares)).sum(dtype=float)
        difference = np.abs(logits - exact)
        self.difference += difference.mean(axis=1, dtype=float).sum()
        self.largest = max(self.largest, float(difference.max()))
        self.agreements += int((logits.argmax(axis=1) == exact.argmax(axis=1)).sum())
        self.positions += len(token_ids)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / self.predictions))

    @property
    def mean_kl(self) -> float:
        return self.kl / self.positions


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, a row at a time: (T, V)."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def measure(
    model: str,
    windows: list[list[int]],
    dtypes: Iterable[str] = (*DTYPES, INT8_CACHE),
    converted: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Quality]:
    """Each dtype of a checkpoint, and what it was converted to by name, all beside float32, which is among the
    results."""
    kinds = {dtype: {"dtype": dtype} for dtype in ("float32", *dtypes)}
    kinds |= {INT8_CACHE: {"kv_cache_dtype": "int8"}} if INT8_CACHE in kinds else {}
    llms = {name: LLM(model, max_num_seqs=1, **kind) for name, kind in kinds.items()}
    llms |= {name: LLM(folder, max_num_seqs=1) for name, folder in converted.items()}
    results = {name: Quality() for name in llms}
    for token_ids in tqdm(windows, desc=Path(model).name, unit="window"):
        exact = llms["float32"].logits(token_ids)  # (T, V)
        for dtype, quality in results.items():
            quality.add(exact if dtype == "float32" else llms[dtype].logits(token_ids), exact, token_ids)
    return results
