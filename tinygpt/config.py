"""EngineConfig: the sizes of an engine, for which memory is reserved at the start."""

from dataclasses import dataclass, replace
from typing import Any

from tinygpt.errors import RequestError, invalid
from tinygpt.weights.config import ModelConfig

# Rows whose logits are computed together if all are wanted: 64 x 50257 x 4 bytes are 13 MB.
LOGIT_ROWS = 64


@dataclass(frozen=True)
class EngineConfig:
    """Sizes, which LLM's docstring explains. `for_model` replaces None by what model and backend suggest."""

    max_num_seqs: int = 32
    prefix_cache_seqs: int = 4
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue: int | None = None
    num_speculative_tokens: int = 4

    def __post_init__(self):
        _check_count("max_num_seqs", self.max_num_seqs, 1)
        _check_count("prefix_cache_seqs", self.prefix_cache_seqs, 0)
        _check_count("max_model_len", self.max_model_len, 1, is_optional=True)
        _check_count("max_queue", self.max_queue, 0, is_optional=True)
        _check_count("max_num_batched_tokens", self.max_num_batched_tokens, 1, is_optional=True)
        _check_count("num_speculative_tokens", self.num_speculative_tokens, 1)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}: each running sample needs "
                "a token of every step, so raise the one or lower the other.",
                "max_num_batched_tokens",
            )

    def for_model(self, config: ModelConfig, max_step_tokens: int) -> "EngineConfig":
        """Return the config for a model, on a backend with at most max_step_tokens in a step."""
        n_positions = config.n_positions  # with ALiBi, the length of training, which is no limit
        if not config.has_alibi and self.max_model_len is not None and self.max_model_len > n_positions:
            raise RequestError(f"is {self.max_model_len} and this model has {n_positions} positions.", "max_model_len")
        return replace(
            self,
            max_model_len=self.max_model_len or n_positions,
            max_num_batched_tokens=self.max_num_batched_tokens or max(max_step_tokens, self.max_num_seqs),
        )

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache: the scheduler's, and a spare one for sequences outside the steps."""
        return self.max_num_seqs + self.prefix_cache_seqs + 1

    @property
    def spare_slot(self) -> int:
        return self.num_slots - 1

    @property
    def max_num_logits(self) -> int:
        """Rows of logits in a step: one for each sequence, and LOGIT_ROWS for prompts and drafts."""
        return LOGIT_ROWS + self.max_num_seqs


def _check_count(name: str, value: Any, least: int, is_optional: bool = False) -> None:
    if value is None and is_optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise invalid(name, value, f"a whole number, {least} or more")
