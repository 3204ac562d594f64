"""Bit for bit: a sequence's logits and tokens depend neither on other sequences nor on how its tokens are fed.

The measure is each sequence's prefill alone on one thread: any batch, order, chunks, slot and threads give its bits.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.golden_models import write_model
from support.kernel_tools import same_bits
from tinygpt import LLM, SamplingParams
from tinygpt.kernels import cpu
from tinygpt.kernels.backend import Batch
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.open import open_checkpoint

THREADS = (1, 2, 4)  # partitions, not cores
SEQUENCES = 5
SLOTS = 7
# Head size 5, width 35, 97 tokens: no dimension is a multiple of a vector or of a tile.
ODD = {"n_embd": 35, "n_head": 7, "n_layer": 3, "vocab_size": 97, "n_positions": 700, "n_inner": 83}
# Three groups of K, the last one not full.
WIDE = {"n_embd": 130, "n_head": 26, "n_layer": 2, "vocab_size": 97, "n_positions": 400, "n_inner": 83}
LENGTHS = {"odd": 200, "wide": 140, "demo": 150}  # positions that are tried
# uint16 holds bfloat16's bits, and uint8 those of an int8 cache: with all bits set, a scale is NaN.
NAN = {np.dtype(np.float32): np.nan, np.dtype(np.uint16): 0x7FFF, np.dtype(np.uint8): 0xFF}
# Model, dtype and KV cache dtype. The demo's products are cut into four segments.
VARIANTS = ["odd-float32-float32", "demo-float32-float32", "wide-bfloat16-bfloat16", "wide-int8-bfloat16"]
VARIANTS += ["wide-float16-float32", "wide-int8-int8", "wide-int4-bfloat16", "demo-int4-bfloat16"]
SLOW = [
    "wide-float32-bfloat16",
    "wide-int8-float32",
    "odd-float32-int8",
    "demo-int8-int8",
    "demo-bfloat16-bfloat16",
]
VARIANTS += [pytest.param(name, marks=pytest.mark.slow) for name in (*SLOW, "demo-int8-bfloat16")]
# The demo takes eight times as long as the odd model, whose steps and kernels are of the same kinds.
LLM_VARIANTS = ["odd-float32", pytest.param("demo-float32", marks=pytest.mark.slow)]
LLM_VARIANTS += ["wide-float16", "wide-bfloat16", "wide-int8", "wide-int4"]


@dataclass(frozen=True)
class Machine:
    params: object
    cache: object
    workspace: object

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, dtype: str, kv_cache_dtype: str, length: int, threads: int
    ) -> "Machine":
        cache = cpu.new_kv_cache(checkpoint.config, SLOTS, length, kv_cache_dtype)
        for array in cache:
            array.fill(NAN[array.dtype])  # what an earlier sequence left behind must never be felt
        tokens = SEQUENCES * length
        workspace = cpu.new_workspace(checkpoint.config, tokens, tokens, threads, dtype)
        return cls(cpu.load_params(checkpoint, dtype, threads), cache, workspace)

    def step(self, chunks, starts, rows, logits_of="all") -> np.ndarray:
        batch = Batch.of(chunks, starts, rows, logits_of)
        return cpu.forward(self.params, batch, self.cache, self.workspace).copy()  # (R, V)


@dataclass(frozen=True)
class Lab:
    """A checkpoint, some sequences, and each one's logits from a prefill alone on one thread."""

    length: int
    machines: dict[int, Machine]
    sequences: list[list[int]]
    alone: list[np.ndarray]  # of each sequence (T, V)


@dataclass(frozen=True)
class Feed:
    """How one sequence is fed: its length, where its prefill is cut, its slot and the step it arrives in."""

    sequence: int
    length: int
    cuts: tuple[int, ...]
    slot: int
    arrival: int

    def chunk(self, step: int) -> tuple[int, int] | None:
        edges = (0, *self.cuts, self.length)
        k = step - self.arrival
        return (edges[k], edges[k + 1]) if 0 <= k < len(edges) - 1 else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    sizes = {"odd": ODD, "wide": WIDE}
    written = {name: write_model(tmp_path_factory.mktemp(name), **fields) for name, fields in sizes.items()}
    return {"demo": "demo", **{name: str(folder) for name, folder in written.items()}}


@pytest.fixture(scope="module", params=VARIANTS)
def lab(request, folders) -> Lab:
    model, dtype, kv_cache_dtype = request.param.split("-")
    checkpoint = open_checkpoint(folders[model])
    length = LENGTHS[model]
    machines = {
        threads: Machine.of(checkpoint, dtype, kv_cache_dtype, length, threads) for threads in THREADS
    }
    random = np.random.default_rng(0)
    sequences = random.integers(checkpoint.config.vocab_size, size=(SEQUENCES, length)).tolist()
    alone = [machines[1].step([ids], [0], [0]) for ids in sequences]
    assert all(np.isfinite(logits).all() for logits in alone)
    return Lab(length, machines, sequences, alone)


@st.composite
def feeds(draw, length: int) -> list[Feed]:
    order = draw(st.lists(st.integers(0, SEQUENCES - 1), min_size=1, max_size=SEQUENCES, unique=True))
    slots = draw(st.permutations(range(SLOTS)))
    lengths = [draw(st.integers(1, length)) for _ in order]
    cuts = [sorted(draw(st.sets(st.integers(1, n - 1), max_size=6))) if n > 1 else [] for n in lengths]
    arrivals = [draw(st.integers(0, 3)) for _ in order]
    parts = zip(order, lengths, map(tuple, cuts), slots, arrivals, strict=False)
    return [Feed(*part) for part in parts]


@given(data=st.data(), threads=st.sampled_from(THREADS))
@settings(max_examples=examples(30))
def test_any_batch_order_chunking_slot_and_threads(lab, data, threads):
    plan = data.draw(feeds(lab.length))
    for step in range(max(feed.arrival + len(feed.cuts) + 1 for feed in plan)):
        now = [(feed, feed.chunk(step)) for feed in plan if feed.chunk(step)]
        if now:
            check_step(lab, threads, now)


def check_step(lab: Lab, threads: int, now: list[tuple[Feed, tuple[int, int]]]) -> None:
    chunks = [lab.sequences[feed.sequence][start:end] for feed, (start, end) in now]
    starts = [start for _, (start, _) in now]
    logits = lab.machines[threads].step(chunks, starts, [feed.slot for feed, _ in now])  # (N, V)
    expected = np.concatenate([lab.alone[feed.sequence][start:end] for feed, (start, end) in now])  # (N, V)
    same_bits(logits, expected)


@pytest.mark.parametrize("threads", THREADS)
def test_decode_steps_equal_one_prefill(lab, threads):
    lengths = [1, 17, 30, 64, 100]  # ragged prompts, then one token of each sequence a step
    rows = list(range(SEQUENCES))
    machine = lab.machines[threads]
    machine.step([ids[:n] for ids, n in zip(lab.sequences, lengths, strict=True)], [0] * SEQUENCES, rows)
    for step in range(40):
        at = [n + step for n in lengths]
        logits = machine.step(
            [[ids[i]] for ids, i in zip(lab.sequences, at, strict=True)], at, rows
        )  # (S, V)
        same_bits(logits, np.stack([alone[i] for alone, i in zip(lab.alone, at, strict=True)]))


@pytest.mark.parametrize("threads", THREADS)
def test_logits_of_some_tokens_equal_logits_of_all(lab, threads):
    machine = lab.machines[threads]
    rows = list(range(SEQUENCES))
    chunks = [ids[: 20 + 7 * s] for s, ids in enumerate(lab.sequences)]
    ends = np.stack([alone[len(chunk) - 1] for alone, chunk in zip(lab.alone, chunks, strict=True)])  # (S, V)
    same_bits(machine.step(chunks, [0] * SEQUENCES, rows, "last"), ends)
    flags = [True, False, False, True, False]
    same_bits(machine.step(chunks, [0] * SEQUENCES, rows, flags), ends[flags])


@pytest.mark.parametrize("threads", THREADS)
def test_a_step_without_logits_still_fills_the_cache(lab, threads):
    machine = lab.machines[threads]
    ids = lab.sequences[0]
    assert machine.step([ids[:70]], [0], [5], [False]).shape[0] == 0
    same_bits(machine.step([ids[70:80]], [70], [5]), lab.alone[0][70:80])


@pytest.mark.parametrize("block", [1, 2, 3, 16, 31, 63, 64, 65])
def test_chunks_of_every_size(lab, block):
    machine, ids = lab.machines[2], lab.sequences[0]
    logits = [machine.step([ids[i : i + block]], [i], [3]) for i in range(0, lab.length, block)]
    same_bits(np.concatenate(logits), lab.alone[0])


def test_the_measure_is_sensitive(lab):
    """Another token at the start changes every later position's bits: what is compared is not a constant."""
    ids = lab.sequences[0]
    other = lab.machines[1].step([[ids[0] ^ 1, *ids[1:]]], [0], [0])  # (T, V)
    assert (other != lab.alone[0]).any(axis=1).all()


@pytest.fixture(scope="module", params=LLM_VARIANTS)
def choice(request, folders) -> dict[str, str]:
    model, dtype = request.param.split("-")
    return {"model": folders[model], "dtype": dtype}


def test_llm_tokens_alone_and_in_any_batch(choice):
    alone = {}
    for threads, slots in ((1, 1), (2, 8), (4, 3)):
        with LLM(**choice, threads=threads, max_num_seqs=slots) as llm:
            prompts = prompts_for(llm)
            params = [params_for(i) for i in range(len(prompts))]
            if not alone:
                alone = {i: tokens(llm.generate([prompts[i]], params[i]))[0] for i in range(len(prompts))}
            for order in orders(len(prompts)):
                outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
                assert tokens(outputs) == [alone[i] for i in order]


def test_llms_that_run_at_the_same_time(choice):
    def run(_) -> list[tuple]:
        with LLM(**choice, threads=3) as llm:
            return tokens(llm.generate(prompts_for(llm)[:5], [params_for(i) for i in range(5)]))

    expected = run(None)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [expected] * 3


def prompts_for(llm: LLM) -> list[list[int]]:
    """The last is longer than a step's budget of new tokens where the model allows, and all together always are."""
    random = np.random.default_rng(1)
    lengths = (1, 140, 7, 120, 3, 129, llm.config.n_positions - 50)
    return [random.integers(llm.config.vocab_size, size=n).tolist() for n in lengths]


def params_for(i: int) -> SamplingParams:
    greedy = SamplingParams(max_tokens=12 + 5 * i, ignore_eos=True, logprobs=2)
    return greedy if i % 2 else replace(greedy, temperature=1.0, top_k=20, top_p=0.9, seed=i)


def orders(count: int) -> Iterator[list[int]]:
    yield list(range(count))
    yield list(reversed(range(count)))
    yield np.random.default_rng(2).permutation(count).tolist()


def tokens(outputs) -> list[tuple]:
    firsts = [output.outputs[0] for output in outputs]
    return [(first.token_ids, first.logprobs, first.cumulative_logprob) for first in firsts]
