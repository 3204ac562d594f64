"""The buffers of a step, allocated for the largest one, and the threads that share it."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..backend import MAX_STEPS, Batch, query_tiles
from .dtypes import DTYPES
from .jit import inline
from .layers.attention import scratch_size
from .layers.linear import SCRATCH
from .layers.operands import Float32Operand
from .layers.ranks import Ranks
from .sampling_rows import MAX_ENDS, Choices
from .screen_pack import ROWS_IN_LEVELS, new_screen
from .simd.tiles import ROW_TILE
from .simd.vector_ir import LANES, zeros
from .team import TeamThreads


class Step(NamedTuple):
    token_ids: np.ndarray  # (N,)
    embeds: np.ndarray  # (N, C or E)  for tokens with a negative id
    positions: np.ndarray  # (N,)
    token_slots: np.ndarray  # (N,)
    tiles: np.ndarray  # (tiles + 1,)  bounds of runs of up to ROW_TILE tokens
    logit_rows: np.ndarray  # (R,)


class Buffers(NamedTuple):
    x: np.ndarray  # (N, C)   the residual stream
    stream: Any  # (N, C)   x as an operand
    embedded: Any  # (N, E)   embeddings of another width, an operand, or None
    to_project: Any  # (N, E)   an operand, or None
    normed: Any  # (N, C)   an operand of operands.py
    qkv: np.ndarray  # (N, 3C)
    attended: np.ndarray  # (N, C)
    heads: Any  # (N, C)   `attended` as an operand
    inner: Any  # (N, F)   an operand
    final: Any  # (R, C)   an operand
    to_score: Any  # (R, E)   an operand; `final` if no projection follows
    mixture: "Mixture | None"
    logits: np.ndarray  # (R, V), and rows for the screen
    every: np.ndarray  # (N,)     0, 1, 2, ...
    hooks: Any  # HookBuffers, or None
    step: Step
    choices: Choices
    sizes: np.ndarray  # (3,)      N, the number of tiles, R
    ranks: Ranks | None
    screen: Any  # of the head, a Screen; None for int8 and int4, and on ranks


class Mixture(NamedTuple):
    """The buffers of layers with k experts a token."""

    normed: Float32Operand  # (N, C)
    scores: np.ndarray  # (N, experts) float64
    chosen: np.ndarray  # (N, k) int32
    shares: np.ndarray  # (N, k) float64
    bounds: np.ndarray  # (experts + 1,) int32: bounds of the experts' pairs
    order: np.ndarray  # (N k,) int32: the row of each pair
    places: np.ndarray  # (N, k) int32: the places of a row's pairs
    pairs: Any  # (N k, C)   an operand
    inner: Any  # (N k, F)   an operand
    outputs: np.ndarray  # (N k, C)


@dataclass(frozen=True)
class Workspace:
    buffers: Buffers
    team: TeamThreads
    hooked: dict[int, Buffers] = field(default_factory=dict)  # with hooks, by a step's first layer

    @property
    def has_lost_rank(self) -> bool:
        return self.buffers.ranks is not None and bool(self.buffers.ranks.status[0])


def new_workspace(
    config,
    max_num_tokens: int,
    max_num_logits: int,
    threads: int = 1,
    dtype: str = "float32",
    share=None,
    allgather=None,
) -> Workspace:
    """share: a rank's RankShare, else all. allgather: Ranks', if several ranks share the layers."""
    part = config if share is None else share
    n = max_num_tokens
    r = max_num_logits
    c = config.n_embd
    e = config.embedding_size
    width = part.n_head * part.head_size
    narrow = bool(config.embed_dim)
    head_dtype = DTYPES[dtype].head
    x, attended = zeros((n, c)), zeros((n, width))
    final = new_operand(dtype if narrow else head_dtype, r, c)
    buffers = Buffers(
        x=x,
        stream=Float32Operand(x),
        embedded=Float32Operand(zeros((n, e))) if narrow else None,
        to_project=new_operand(dtype, n, e) if narrow else None,
        normed=new_operand(dtype, n, c),
        qkv=zeros((n, 3 * width)),
        attended=attended,
        heads=DTYPES[dtype].operand_of(attended),
        inner=new_operand(dtype, n, part.inner_size),
        final=final,
        to_score=new_operand(head_dtype, r, e) if narrow else final,
        mixture=_new_mixture(config, n, dtype) if config.expert_layers else None,
        logits=zeros((r + ROWS_IN_LEVELS, part.vocab_size)),
        every=np.arange(n, dtype=np.int32),
        hooks=None,
        step=Step(
            token_ids=np.zeros(n, np.int32),
            embeds=zeros((n, e)),
            positions=np.zeros(n, np.int32),
            token_slots=np.zeros(n, np.int32),
            tiles=np.zeros(n + 1, np.int32),
            logit_rows=np.zeros(r, np.int32),
        ),
        choices=Choices(
            wanted=np.zeros(1, np.int64),
            counts=np.zeros(r, np.int64),
            token_ids=np.zeros((MAX_STEPS, r), np.int32),
            ends=np.zeros(MAX_ENDS, np.int32),
            num_ends=np.zeros(1, np.int64),
            has_ended=np.zeros(1, np.int64),
            stop_early=np.zeros(1, np.int64),
            num_tokens=np.zeros(r, np.int64),
        ),
        sizes=np.zeros(3, np.int64),
        ranks=None if allgather is None else _new_ranks(share, n, allgather),
        screen=new_screen(r, part.vocab_size, e) if share is None and head_dtype != "int8" else None,
    )
    scratch = max(SCRATCH, scratch_size(config.head_size), c, e, part.inner_size)
    return Workspace(buffers, TeamThreads(threads, zeros((threads, -(-scratch // LANES) * LANES))))


def _new_mixture(config, n: int, dtype: str) -> Mixture:
    k = config.experts_per_token
    experts = config.num_experts
    return Mixture(
        normed=Float32Operand(zeros((n, config.n_embd))),
        scores=np.zeros((n, experts)),
        chosen=np.zeros((n, k), np.int32),
        shares=np.zeros((n, k)),
        bounds=np.zeros(experts + 1, np.int32),
        order=np.zeros(n * k, np.int32),
        places=np.zeros((n, k), np.int32),
        pairs=new_operand(dtype, n * k, config.n_embd),
        inner=new_operand(dtype, n * k, config.inner_size),
        outputs=zeros((n * k, config.n_embd)),
    )


def _new_ranks(part, n: int, allgather: np.ndarray) -> Ranks:
    return Ranks(
        partial=zeros((n, part.n_embd)),
        gathered=zeros((part.tensor_size * n * part.n_embd,)),
        owners=np.full(n, -1, np.int32),
        allgather=allgather,
        status=np.zeros(part.tensor_size, np.int64),
        no_bias=np.empty((1, 0), np.float32),
    )


def share_embedding(workspace: Workspace, batch: Batch, starts: np.ndarray, rank: int) -> Batch:
    """Note the owners of tokens (N,). Return the batch with this rank's ids. starts: each rank's first token."""
    owners = np.maximum(np.searchsorted(starts, batch.token_ids, side="right") - 1, 0)
    workspace.buffers.ranks.owners[: owners.size] = owners
    own = np.where(owners == rank, batch.token_ids - starts[rank], -1)
    return replace(batch, token_ids=own.astype(np.int32))


def stream_of(workspace: Workspace, count: int) -> np.ndarray:
    """Return x (N, C) of the last step's `count` tokens."""
    return workspace.buffers.x[:count]


def logits_of(workspace: Workspace, logits: np.ndarray, first_row: int) -> np.ndarray:
    """Return logits as `sample` takes them."""
    return logits


def new_operand(dtype: str, n: int, k: int):
    return DTYPES[dtype].new_operand(n, k)


def fill(buffers: Buffers, batch, num_steps: int = 0) -> None:
    """Copy the batch to the buffers. num_steps: steps that choose tokens; 0: logits alone."""
    step = buffers.step
    tiles = query_tiles(batch.seq_starts, ROW_TILE)
    n = batch.token_ids.size
    r = batch.logit_rows.size
    step.token_ids[:n] = batch.token_ids
    if batch.embeds.size:
        with_embeds = np.flatnonzero(batch.token_ids < 0)
        step.embeds[with_embeds] = batch.embeds[-1 - batch.token_ids[with_embeds]]
    step.positions[:n] = batch.positions
    step.token_slots[:n] = batch.token_slots
    step.tiles[: tiles.size] = tiles
    step.logit_rows[:r] = batch.logit_rows
    buffers.choices.wanted[0] = num_steps
    buffers.choices.counts[:r] = 0
    buffers.choices.has_ended[0] = 0
    buffers.sizes[:] = n, tiles.size - 1, r


@inline
def step_of(buffers):
    s = buffers.step
    n = buffers.sizes[0]
    tiles = buffers.sizes[1]
    r = buffers.sizes[2]
    where = s.positions[:n], s.token_slots[:n]
    return Step(s.token_ids[:n], s.embeds[:n], *where, s.tiles[: tiles + 1], s.logit_rows[:r])
