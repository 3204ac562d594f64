"""Workspace: the device's buffers of a step, allocated once for the largest one, and the steps' graphs."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.params import array_type, family_of, padded_columns, padded_head
from tinygpt.kernels.cuda.persistent.contest import Contest
from tinygpt.kernels.cuda.runtime import device as devices
from tinygpt.kernels.cuda.sampling.state import Draws, draws_bytes, new_draws
from tinygpt.kernels.cuda.sizes import Sizes, sizes_of

# Indices of Inputs.sizes: the tokens of a step, the rows whose logits are wanted, the steps that were run ahead.
TOKENS, LOGIT_ROWS, STEPS_DONE = 0, 1, 2
NUM_SIZES = 4
MAX_GRAPHS = 64  # each keeps some 100 kB of the card


@dataclass(frozen=True)
class Inputs:
    """What a step's batch tells the kernels: parts of one int32 array, so that one copy brings it to the device."""

    everything: Any
    sizes: Any  # (NUM_SIZES,)
    token_ids: Any  # (N,)
    positions: Any  # (N,)
    token_slots: Any  # (N,) the cache row of each token
    logit_rows: Any  # (R,)
    tiles: Any  # bounds of runs of up to QUERY_TILE tokens of one sequence; the rest are empty

    def write(self, device: Any, parts: dict[str, np.ndarray]) -> None:
        """Fill the parts from their beginning on; the rest of each is 0."""
        values, start = np.zeros(self.everything.size, np.int32), 0
        for name in ("sizes", "token_ids", "positions", "token_slots", "logit_rows", "tiles"):
            values[start : start + parts[name].size] = parts[name]
            start += getattr(self, name).size
        device.write(self.everything, values)


@dataclass
class Graphs:
    """The kernels of a step, queued at once. The first step of a kind queues them one by one, and so compiles them."""

    device: Any
    _captured: dict[Hashable, Callable[[], None] | None] = field(default_factory=dict)

    def run(self, kind: Hashable, step: Callable[[], None]) -> None:
        """Queue what `step` queues, which is the same for every step of this kind."""
        if kind not in self._captured:
            step()
            while len(self._captured) >= MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]  # the oldest
            self._captured[kind] = None
            return
        if self._captured[kind] is None:
            self._captured[kind] = self.device.capture(step)
        self._captured[kind]()


@dataclass(frozen=True)
class Workspace:
    """Buffers for steps of N tokens, of which R have logits. Activations are float32, or bfloat16 as uint16."""

    device: Any
    inputs: Inputs
    embeds: Any  # (N, C) float32, in place of the embedding of a token whose id is negative
    x: Any  # (N, C) float32, the residual stream
    normed: Any  # (max(N, R), Cp)
    q: Any  # (N, H, Dp)
    attended: Any  # (N, Cp)
    partials: Any  # (tokens of a decode step, H, chunks, Dp + 2) float32
    inner: Any  # (N, Fp)
    logits: Any  # (R, V) float32
    every: Any  # (N,) int32: 0, 1, 2, ...
    draws: Draws
    sizes: Sizes
    graphs: Graphs
    contests: dict[int, Contest] = field(default_factory=dict)  # by the sequences of a step, rounded up


def new_workspace(
    config: Any, max_num_tokens: int, max_num_logits: int, threads: int = 1, dtype: str = "float32"
) -> Workspace:
    """Buffers for steps of up to max_num_tokens new tokens, max_num_logits of them with logits."""
    device, sizes = devices.card(), sizes_of(config, max_num_tokens, max_num_logits)
    kind, shapes = array_type(family_of(dtype)), _shapes(config, sizes)
    buffers = {name: device.zeros(shape, np.float32) for name, shape in shapes["float32"].items()}
    buffers |= {name: device.zeros(shape, kind) for name, shape in shapes["family"].items()}
    return Workspace(
        device=device,
        inputs=_new_inputs(device, sizes),
        draws=new_draws(device, config, sizes),
        every=device.array(np.arange(max(sizes.tokens, sizes.logits), dtype=np.int32)),
        sizes=sizes,
        graphs=Graphs(device),
        **buffers,
    )


def workspace_bytes(config: Any, sizes: Sizes, dtype: str) -> int:
    """What `new_workspace` takes of the card's memory."""
    item = 4 if family_of(dtype) == "float32" else 2
    shapes = _shapes(config, sizes)
    numbers = {kind: sum(math.prod(shape) for shape in shapes[kind].values()) for kind in shapes}
    inputs, draws = 4 * 6 * (sizes.tokens + sizes.logits), draws_bytes(config, sizes)
    return 4 * numbers["float32"] + item * numbers["family"] + inputs + draws


def _shapes(config: Any, sizes: Sizes) -> dict[str, dict[str, tuple[int, ...]]]:
    n, r, heads, padded = sizes.tokens, sizes.logits, config.n_head, padded_head(config.head_size)
    columns = padded_columns(config.n_embd)
    return {
        "float32": {
            "embeds": (n, config.n_embd),
            "x": (n, config.n_embd),
            "partials": (sizes.decode_tokens, heads, sizes.max_chunks, padded + 2),
            "logits": (r, config.vocab_size),
        },
        "family": {
            "normed": (max(n, r), columns),
            "q": (n, heads, padded),
            "attended": (n, columns),
            "inner": (n, padded_columns(config.inner_size)),
        },
    }


def _new_inputs(device: Any, sizes: Sizes) -> Inputs:
    n, r = sizes.tokens, sizes.logits
    lengths = {
        "sizes": NUM_SIZES,
        "token_ids": n,
        "positions": n,
        "token_slots": n,
        "logit_rows": r,
        "tiles": 2 * n + 2,  # a tile has one token at least, and their number is rounded up
    }
    everything, parts, start = device.zeros((sum(lengths.values()),), np.int32), {}, 0
    for name, length in lengths.items():
        parts[name] = everything[start : start + length]
        start += length
    return Inputs(everything, **parts)
