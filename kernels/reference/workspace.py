"""The buffers of a step: none, as the reference allocates what it needs as it goes."""


def new_workspace(config, max_num_tokens: int, max_num_logits: int, threads: int = 1, dtype: str = "float32") -> None:
    """Nothing; the other backends return their buffers here."""
