"""Soft prompts: vectors in place of a prompt's first words, which requests ask for by name or bring along.

In a sequence they are virtual tokens: ids below 0 that no other soft prompt ever has. So prompts that begin with the
same ids still begin with the same keys and values, and what the KV cache knows of its slots stays right.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.errors import RequestError
from tinygpt.sampling_params import SamplingParams
from tinygpt.weights.adapters.soft_prompt import SoftPrompt, read_soft_prompt
from tinygpt.weights.config import ModelConfig

# Ids from here down belong to one request and never come again: what begins with one is of no use to a later one.
SINGLE_USE_IDS = -(2**31)


@dataclass(frozen=True, eq=False)
class VirtualTokens:
    """A soft prompt, and the ids that its positions have in a sequence that begins with it."""

    token_ids: list[int]
    prompt: SoftPrompt

    def __len__(self) -> int:
        return len(self.token_ids)


class SoftPrompts:
    """The soft prompts that a model was given, by name, and the ids of all that its requests use.

    sources: a folder or file, as `read_soft_prompt` takes it, for each name.
    """

    def __init__(self, sources: Mapping[str, str | os.PathLike[str]] | None, config: ModelConfig):
        self._config = config
        self._next_id = -1
        self._lock = threading.Lock()
        self._named = {name: self._add(read_soft_prompt(source, config)) for name, source in _checked(sources).items()}
        self._next_id = SINGLE_USE_IDS

    def find(self, params: SamplingParams) -> VirtualTokens | None:
        """What a request wants in front of its prompt; RequestError if there is no such thing or it does not fit."""
        if params.prompt_embeds is not None:
            return self._add(SoftPrompt("prompt", embeds=self._checked_embeds(params.prompt_embeds)))
        if params.soft_prompt is None:
            return None
        if params.soft_prompt not in self._named:
            known = f"the names are {', '.join(map(repr, self._named))}" if self._named else "none was loaded"
            raise RequestError(
                f"soft_prompt is {params.soft_prompt!r} and {known}: load it with LLM(soft_prompts={{name: path}})."
            )
        return self._named[params.soft_prompt]

    def _add(self, prompt: SoftPrompt) -> VirtualTokens:
        with self._lock:  # requests come from any thread
            first, self._next_id = self._next_id, self._next_id - len(prompt)
        return VirtualTokens(list(range(first, first - len(prompt), -1)), prompt)

    def _checked_embeds(self, embeds: np.ndarray) -> np.ndarray:
        if embeds.shape[1] != (width := self._config.embedding_size):
            raise RequestError(
                f"prompt_embeds has shape {embeds.shape} and this model's embeddings are {width} wide: "
                f"give an array of shape (P, {width})."
            )
        return embeds


def _checked(sources: Any) -> Mapping[str, str | os.PathLike[str]]:
    sources = {} if sources is None else sources
    if not isinstance(sources, Mapping) or not all(isinstance(name, str) and name for name in sources):
        raise RequestError(f"soft_prompts is {sources!r} and must be a dict from names to folders or files.")
    return sources
