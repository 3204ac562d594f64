"""What is measured, and the shortest time in which the machine could do it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`new` tokens for each of `batch` prompts of `prompt` tokens; new = 1 is a prefill."""

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def is_prefill(self) -> bool:
        return self.new == 1


CASES = (
    Case("decode, batch 1", 1, 50, 100),
    Case("decode, batch 8", 8, 32, 64),
    Case("decode, batch 32", 32, 32, 64),
    Case("prefill 512", 1, 512, 1),
)
LONG_CASES = (
    Case("decode at 1000, batch 1", 1, 1000, 24),
    Case("decode at 1000, batch 8", 8, 1000, 24),
)

# Bytes of one weight in the blocks, of one in the head, and of one number in the KV cache. The scales of int8 are too
# few to count; int4 has a bfloat16 scale and offset for every 32 weights, and an int8 head.
BYTES = {"float32": (4, 4, 4), "bfloat16": (2, 2, 2), "int8": (1, 1, 2), "int4": (0.5 + 4 / 32, 1, 2)}


@dataclass(frozen=True)
class Floor:
    """The shortest time of a case, in milliseconds, and the limit that sets it."""

    ms: float
    limit: str


def floor(case: Case, config: dict, dtype: str, limits: dict[str, float]) -> Floor:
    """The larger of two times: reading each byte once at the machine's bandwidth, multiplying at our tiles' rate.

    limits: bytes a second "bandwidth", operations a second for each kind of tile.
    """
    head_kind = "int8" if dtype == "int4" else dtype
    seconds = {
        "bandwidth": bytes_read(case, config, dtype) / limits["bandwidth"],
        "tile peak": block_operations(case, config) / limits[dtype] + head_operations(case, config) / limits[head_kind],
    }
    limit = max(seconds, key=seconds.__getitem__)
    return Floor(1e3 * seconds[limit], limit)


def block_weights(config: dict) -> int:
    c, f = config["n_embd"], inner_size(config)
    return config["n_layer"] * (4 * c * c + 2 * c * f)


def inner_size(config: dict) -> int:
    return config.get("n_inner") or 4 * config["n_embd"]


def cached_positions(case: Case) -> float:
    """Positions of one sequence that a step attends to, on average over the steps."""
    return (case.prompt + 1) / 2 if case.is_prefill else case.prompt + case.new / 2


def new_tokens(case: Case) -> int:
    """Tokens that go through the blocks in the time that is measured."""
    return case.batch * (case.prompt if case.is_prefill else 1)


def bytes_read(case: Case, config: dict, dtype: str) -> float:
    in_block, in_head, in_cache = BYTES[dtype]
    weights = in_block * block_weights(config) + in_head * config["vocab_size"] * config["n_embd"]
    if case.is_prefill:  # keys and values are written, and read again from the caches
        return weights
    return weights + in_cache * case.batch * cached_positions(case) * 2 * config["n_layer"] * config["n_embd"]


def block_operations(case: Case, config: dict) -> float:
    attention = 4 * cached_positions(case) * config["n_layer"] * config["n_embd"]
    return new_tokens(case) * (2 * block_weights(config) + attention)


def head_operations(case: Case, config: dict) -> float:
    return 2 * case.batch * config["vocab_size"] * config["n_embd"]
