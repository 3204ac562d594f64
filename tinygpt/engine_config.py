"""EngineConfig: how much may run at once, which memory is laid out for before the start."""

from dataclasses import dataclass

# Rows whose logits are computed together when all are wanted: 64 x 50257 x 4 bytes are 13 MB.
LOGIT_ROWS = 64


@dataclass(frozen=True)
class EngineConfig:
    """LLM's docstring says what each is."""

    max_num_seqs: int
    prefix_cache_seqs: int
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def num_slots(self) -> int:
        """Of the KV cache: the scheduler's, and one more for `Engine.logits`."""
        return self.max_num_seqs + self.prefix_cache_seqs + 1

    @property
    def max_num_logits(self) -> int:
        """Tokens of a step whose logits may be wanted: one of each sequence, and LOGIT_ROWS of prompts and guesses."""
        return LOGIT_ROWS + self.max_num_seqs
