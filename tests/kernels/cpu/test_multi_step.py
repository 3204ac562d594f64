"""Several steps in one call, beside as many calls of one: tokens, keys and values bit for bit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from support.golden_models import write_model
from support.kernel_tools import warpers_of
from tinygpt.kernels import cpu
from tinygpt.kernels.backend import Batch
from tinygpt.kernels.numbers import Warpers
from tinygpt.weights.open import open_checkpoint

# 97 tokens, 7 heads of 5: no dimension is a multiple of a vector or of a tile.
FIELDS = {"n_embd": 35, "n_head": 7, "n_layer": 3, "vocab_size": 97, "n_positions": 200, "n_inner": 83}
STARTS = [62, 5, 0, 17, 63, 120, 1]  # some cross into a block of keys
STEPS = 6
THREADS = (1, 2, 4)


@dataclass(frozen=True)
class Decoding:
    """Sequences that have been read, and are to go on."""

    params: Any
    cache: Any
    workspace: Any
    batch: Batch

    @classmethod
    def of(cls, folder: str, dtype: str, threads: int) -> "Decoding":
        checkpoint = open_checkpoint(folder)
        count = len(STARTS)
        kind = cpu.kv_cache_dtypes(dtype)[0]
        cache = cpu.new_kv_cache(checkpoint.config, count, FIELDS["n_positions"], kind)
        workspace = cpu.new_workspace(checkpoint.config, 300, 300, threads, dtype)
        params = cpu.load_params(checkpoint, dtype, 1)
        random = np.random.default_rng(0)
        read = [random.integers(97, size=start).tolist() for start in STARTS]
        slots = [3, 0, 6, 2, 1, 5, 4]
        given, of = zip(*((ids, slot) for ids, slot in zip(read, slots, strict=True) if ids), strict=True)
        cpu.forward(params, Batch.of(given, [0] * len(given), of), cache, workspace)
        return cls(params, cache, workspace, Batch.of([[i] for i in range(count)], STARTS, slots))

    def at_once(self, warpers: Warpers, steps: int, ends=()) -> np.ndarray:
        on = self.params, self.batch, self.cache, self.workspace
        found = cpu.multi_step(*on, warpers, *self.draws, steps, np.array(ends, np.int32))
        return np.stack(list(found))  # (steps, S)

    def one_by_one(self, warpers: Warpers, steps: int) -> np.ndarray:
        token_ids = self.batch.token_ids.tolist()
        starts = list(STARTS)
        found = []
        for _ in range(steps):
            batch = Batch.of([[token_id] for token_id in token_ids], starts, self.batch.slots)
            logits = cpu.forward(self.params, batch, self.cache, self.workspace)
            token_ids = cpu.sample(logits, warpers, *self.draws, batch.context_lens).tolist()
            starts = [start + 1 for start in starts]
            found.append(token_ids)
        return np.array(found, np.int32)

    @property
    def draws(self) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(7, dtype=np.uint64), np.zeros(7, np.uint64)

    def left(self) -> list[bytes]:
        """The keys and values, as bits."""
        return [
            array.tobytes()
            for slot, start in zip(self.batch.slots.tolist(), STARTS, strict=True)
            for array in cpu.read_positions(self.cache, slot, 0, start + STEPS, 5)
        ]


GREEDY = warpers_of(7, 0.0)
SOME_DRAWN = warpers_of(7, [1.0, 0.0, 0.7, 0.0, 3.0, 0.0, 1.0])
FEW_TOKENS = warpers_of(7, 0.0, num_tokens=[97, 1, 30, 31, 96, 64, 50])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), **FIELDS))


@pytest.mark.parametrize("warpers", [GREEDY, SOME_DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_bits_of_single_steps(folder, dtype, warpers):
    single = Decoding.of(folder, dtype, 1)
    expected = single.one_by_one(warpers, STEPS)
    assert len(set(expected.ravel().tolist())) > STEPS
    for threads in THREADS:
        decoding = Decoding.of(folder, dtype, threads)
        assert decoding.at_once(warpers, STEPS).tolist() == expected.tolist()
        assert decoding.left() == single.left()


def test_tokens_are_of_a_rows_first_scores(folder):
    expected = Decoding.of(folder, "float32", 1).one_by_one(FEW_TOKENS, STEPS)
    assert (expected < FEW_TOKENS.num_tokens).all()
    assert (Decoding.of(folder, "float32", 1).one_by_one(GREEDY, STEPS) >= FEW_TOKENS.num_tokens).any()
    assert Decoding.of(folder, "float32", 2).at_once(FEW_TOKENS, STEPS).tolist() == expected.tolist()


def test_calls_of_any_number_of_steps_follow_one_another(folder):
    """A thread that is late may still be in an earlier call's step."""
    expected = Decoding.of(folder, "float32", 1).one_by_one(GREEDY, STEPS).tolist()
    decoding = Decoding.of(folder, "float32", 4)
    for _ in range(100):
        for steps in (1, STEPS, 3, 2):
            assert decoding.at_once(GREEDY, steps).tolist() == expected[:steps]
        logits = cpu.forward(decoding.params, decoding.batch, decoding.cache, decoding.workspace)
        assert logits.argmax(1).tolist() == expected[0]


def test_a_sequence_that_is_not_finite_concerns_no_other(folder):
    expected = Decoding.of(folder, "float32", 1).one_by_one(GREEDY, STEPS)
    decoding = Decoding.of(folder, "float32", 2)
    shape = 3, 7, STARTS[3], 5
    cpu.write_positions(decoding.cache, 2, 0, *np.full((2, *shape), np.nan, np.float32))
    found = decoding.at_once(GREEDY, STEPS)
    assert found[:, 3].tolist() == [-1]  # nothing comes behind it
    assert np.delete(found, 3, 1).tolist() == np.delete(expected, 3, 1)[:1].tolist()


@pytest.mark.parametrize("warpers", [GREEDY, SOME_DRAWN], ids=["greedy", "drawn"])
def test_where_it_is_to_stop_early_the_first_step_is_the_last(folder, warpers):
    decoding = Decoding.of(folder, "float32", 2)
    expected = decoding.at_once(warpers, STEPS).tolist()
    cpu.stop_early(decoding.workspace, True)
    assert decoding.at_once(warpers, STEPS).tolist() == expected[:1]
    cpu.stop_early(decoding.workspace, False)
    assert decoding.at_once(warpers, STEPS).tolist() == expected


def test_to_stop_early_costs_no_token(folder):
    decoding = Decoding.of(folder, "float32", 2)
    expected = decoding.at_once(GREEDY, 16).tolist()
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            cpu.stop_early(decoding.workspace, True)
            cpu.stop_early(decoding.workspace, False)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(disturb)
        try:
            for _ in range(300):
                found = decoding.at_once(GREEDY, 16).tolist()
                assert found == expected[: max(len(found), 1)]
        finally:
            is_over.set()


def test_the_step_with_a_token_that_ends_a_sequence_is_the_last(folder):
    decoding = Decoding.of(folder, "float32", 2)
    expected = decoding.at_once(GREEDY, STEPS).tolist()
    met = [token_ids[5] for token_ids in expected]  # of one sequence
    others = sorted(set(range(97)) - {token_id for token_ids in expected for token_id in token_ids})
    for end in set(met):
        first = next(i for i, token_ids in enumerate(expected) if end in token_ids)
        assert decoding.at_once(GREEDY, STEPS, [*others[:5], end]).tolist() == expected[: first + 1]
    assert decoding.at_once(GREEDY, STEPS, others[:5]).tolist() == expected
    assert decoding.at_once(GREEDY, STEPS, others[:65]).tolist() == expected[:1]  # more than a call looks for
