"""What holds for a backend that runs on any machine, in the memory that all share."""

QUEUES_STEPS = False  # the host waits for a step, or for several, and looks at nothing meanwhile


def check_device() -> None:
    """Every machine will do."""


def check_model(config) -> None:
    """Every model will do."""


def check_memory(config, tied, dtype, kv_cache_dtype, num_slots, max_model_len, max_num_tokens, max_num_logits) -> None:
    """Nobody knows what the machine's memory can give until it is asked for it."""
