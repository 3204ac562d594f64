"""The interface of a backend: its functions, the arrays of a step, and names that backends share."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

KINDS = ("weight", "bias")
# Names in the kernels, and in a checkpoint's layer.
LINEARS = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
NORM_BEFORE = {"c_attn": "ln_1", "c_fc": "ln_2"}  # the layer norm before a linear layer
NORMS = tuple(NORM_BEFORE.values())
# Kinds of points in a layer: the residual stream, (N, C); heads, (N, H, D); summands; the MLP's units, (N, F).
LOOKS = ("resid_pre", "q", "k", "v", "z", "attn_out", "resid_mid", "pre", "post", "mlp_out", "resid_post")
SCORES = ("attn_scores", "pattern")  # (n, H, T) of one sequence
MAX_STEPS = 16  # of a multi-step, whose tokens a workspace keeps
NO_EMBEDS = np.empty((0, 0), np.float32)


def no_op(*arguments) -> None:
    pass


class WeightError(Exception):
    """A weight that its dtype cannot hold."""


class DeviceError(Exception):
    """This machine cannot run a backend or a model."""


@dataclass(frozen=True)
class Batch:
    """A step's N new tokens of S sequences, end to end. Integers are int32.

    Prefill, chunked prefill and decode differ in `seq_starts` alone.
    """

    token_ids: np.ndarray  # (N,)
    positions: np.ndarray  # (N,)    in the sequence, from 0
    seq_starts: np.ndarray  # (S+1,)  sequence s has tokens seq_starts[s]:seq_starts[s+1]
    slots: np.ndarray  # (S,)    slot of the KV cache
    context_lens: np.ndarray  # (S,)    positions in the cache after this step
    logit_rows: np.ndarray  # (R,)    tokens whose logits are wanted
    embeds: np.ndarray  # (E, C)  float32; token id -1-j stands for row j
    # () -> Warpers of the R rows, or None; logits that no draw by them takes may be -inf
    drawn_by: Callable[[], Any] = no_op

    @classmethod
    def of(
        cls,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int],
        slots: Sequence[int],
        logits_of: str | Sequence[int] = "last",
        embeds: np.ndarray = NO_EMBEDS,
    ) -> "Batch":
        """Lay the next tokens of each sequence, chunks[s] from position starts[s], end to end.

        logits_of: "all" tokens, the "last" of each sequence, or a count of last tokens for each sequence
        """
        starts = np.array(starts, np.int32)  # (S,)
        if all(len(chunk) == 1 for chunk in chunks):  # decoding needs no array for each sequence
            seq_starts = np.arange(len(chunks) + 1, dtype=np.int32)
            context_lens = starts + np.int32(1)
            token_ids = np.array([chunk[0] for chunk in chunks], np.int32)
            positions = starts
        else:
            lens = np.array([len(chunk) for chunk in chunks], np.int32)
            seq_starts = _bounds(lens)
            context_lens = starts + lens
            token_ids = np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks])
            positions = _runs(starts, lens)
        if logits_of == "all":
            logit_rows = np.arange(seq_starts[-1], dtype=np.int32)
        elif logits_of == "last" or all(count == 1 for count in logits_of):
            logit_rows = seq_starts[1:] - np.int32(1)
        else:
            counts = np.array(logits_of, np.int32)  # (S,)
            logit_rows = _runs(seq_starts[1:] - counts, counts)
        return cls(
            token_ids, positions, seq_starts, np.array(slots, np.int32), context_lens, logit_rows, embeds
        )

    def next_step(self, token_ids: np.ndarray) -> "Batch":
        """Return the decode step of these tokens (S,), with 0 for -1."""
        context_lens = self.context_lens + np.int32(1)
        return replace(
            self, token_ids=np.maximum(token_ids, 0), positions=self.context_lens, context_lens=context_lens
        )

    @property
    def token_slots(self) -> np.ndarray:
        return np.repeat(self.slots, np.diff(self.seq_starts))


class Hooks(Protocol):
    """A caller inside a step: its arrays at some points, as they come by.

    points: kinds, of LOOKS or SCORES, with layers; changes: whether it writes anywhere; first: the layer that the step
    begins with, after a "resid_post" to which it writes the stream.
    """

    points: Set[tuple[str, int]]
    changes: bool
    first: int

    def __call__(self, kind: str, layer: int, array: np.ndarray, sequence: int | None = None) -> None:
        """See the step's rows (N, ...), or a sequence's: the step goes on with what is written to them."""


class Backend(Protocol):
    """The functions of a backend's package. Its Params, KV cache and workspace are opaque to callers.

    N new tokens, S sequences, R rows of logits, V vocabulary, L layers, C n_embd, H heads, D head size.
    """

    DTYPES: tuple[str, ...]  # of weights
    ADAPTED: tuple[str, ...]  # those of DTYPES that compute with adapters
    MAX_STEP_TOKENS: int  # N that fills the device
    PACKED: Any  # the module that stores Params, or None
    QUEUES_STEPS: bool  # whether `multi_step` returns before its last step has run
    SEEN: tuple[str, ...]  # the kinds that Hooks see
    CHANGED: tuple[str, ...]  # those of SEEN to which Hooks may write

    def check_device(self, number: int = 0) -> None:
        """number: of this process on its host."""

    def check_model(self, config) -> None: ...

    def check_memory(
        self, config, tied, dtype, kv_cache_dtype, num_slots, max_model_len, max_num_tokens, max_num_logits
    ) -> None: ...

    def load_params(self, checkpoint, dtype: str, threads: int) -> Any:
        """Pack a checkpoint: config, stored, tensor(name) -> (out, in) float32, release(name)."""

    def with_adapters(self, params, config, adapters: list[dict], num_slots: int) -> tuple[Any, np.ndarray]:
        """Return Params with LoRA's adapters, and an array (slots,), int32, of the adapter of each KV slot.

        adapters: {name of a linear layer: (down (r, K), up (N, r))}; -1: none, as at first. May be None.
        """

    def kv_cache_dtypes(self, dtype: str) -> tuple[str, ...]:
        """Return the KV cache's dtypes, the default first."""

    def new_kv_cache(self, config, num_slots: int, max_model_len: int, dtype: str) -> Any: ...

    def kv_cache_bytes(self, config, num_slots: int, max_model_len: int, dtype: str) -> int: ...

    def new_workspace(
        self, config, max_num_tokens: int, max_num_logits: int, threads: int, dtype: str
    ) -> Any: ...

    def forward(self, params, batch: Batch, kv_cache, workspace, look: Hooks | None = None) -> Any:
        """Run a step. Return logits (R, V) float32, valid until the next step."""

    def multi_step(
        self, params, batch: Batch, kv_cache, workspace, warpers, seeds, sample_indices, num_steps: int, ends
    ) -> Iterable[np.ndarray]:
        """Run up to num_steps decode steps. Return the tokens (S,) int32 of each, -1 for a row that is not finite.

        A token in `ends` (E,) int32 makes its step the last. May be None.
        """

    def stop_early(self, workspace, is_wanted: bool) -> None:
        """Make the current step the last, from any thread."""

    def final_norm(self, params, x: np.ndarray) -> np.ndarray:
        """Return ln_f of x (N, C), or x if the model has none."""

    def sample(self, logits, warpers, seeds, sample_indices, positions) -> np.ndarray: ...

    def process_logits(self, logits, processors) -> None: ...

    def filter_logits(self, logits, warpers) -> np.ndarray: ...

    def top_logprobs(self, logits, token_id: int, n: int) -> tuple[np.ndarray, np.ndarray, float]: ...

    def copy_positions(self, kv_cache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        """Copy positions bit for bit. Later positions become undefined, as after `write_positions`."""

    def read_positions(
        self, kv_cache, slot: int, start: int, stop: int, head_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return copies (L, H, stop - start, D) in the cache's dtype; int8 as rows of numbers.py."""

    def write_positions(self, kv_cache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Write keys and values, float32 or as read."""


def query_tiles(seq_starts: np.ndarray, size: int) -> np.ndarray:
    """Cut sequences' new tokens into runs of up to `size`. Return the bounds (tiles + 1,)."""
    starts, stops = seq_starts[:-1], seq_starts[1:]
    if stops[-1] == starts.size:  # one token each, as in decoding
        return seq_starts
    runs = [np.arange(start, stop, size) for start, stop in zip(starts, stops, strict=True)]
    return np.concatenate([*runs, seq_starts[-1:]])


def _bounds(lens: np.ndarray) -> np.ndarray:
    bounds = np.zeros(lens.size + 1, np.int32)
    np.cumsum(lens, out=bounds[1:])
    return bounds


def _runs(firsts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    bounds = _bounds(lens)
    return np.arange(bounds[-1], dtype=np.int32) + np.repeat(firsts - bounds[:-1], lens)
