"""The screened head beside the whole one: each logit has its bits or is -inf, and no wanted one is -inf.

python tests/kernels/cpu/test_screen.py 10000    # random steps instead of a few
"""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from support.examples import daily
from support.kernel_tools import packed, put_rows, same_bits, unpacked, warpers_of
from tinygpt.kernels.cpu import screen_pack
from tinygpt.kernels.cpu.arrays import NO_BIAS, NO_FACTORS
from tinygpt.kernels.cpu.dtypes import DTYPES
from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.linear import SCRATCH, Linear, whole
from tinygpt.kernels.cpu.screen import plan_screen, score_tokens
from tinygpt.kernels.cpu.screen_pack import ROWS_IN_LEVELS, new_screen
from tinygpt.kernels.cpu.simd.vector_ir import zeros
from tinygpt.kernels.cpu.team import TeamThreads, begin_step, join_step
from tinygpt.kernels.cpu.workspace import new_operand

SCREENED = [name for name, row in DTYPES.items() if row.head != "int8"]
SHAPE = 4353, 70  # neither is a multiple of a tile
PARTS = {"float32": 28, "float16": 56, "bfloat16": 56}


@kernel
def take_heads(team, leads, head, segments, logits, x, screen, products):
    while leads or join_step(team):
        if leads:
            begin_step(team)
        score_tokens(team, None, head, segments, logits, x, x, screen, products)
        if leads:
            break


@dataclass
class Head:
    weight: np.ndarray  # (V, K)
    dtype: str
    threads: int = 1

    def __post_init__(self):
        n, k = self.weight.shape
        self.head = Linear(packed(self.weight, self.dtype), NO_BIAS, NO_FACTORS)
        self.segments = whole(k)
        self.screen = new_screen(32, n, k)
        self._team = TeamThreads(self.threads, zeros((self.threads, SCRATCH)))
        for _ in range(1 + PARTS[self.dtype]):
            self.logits(np.zeros((1, k)), 1)

    def logits(self, x: np.ndarray, *top: int, num_tokens: float = np.inf) -> np.ndarray:
        """Logits (R, V) of states (R, K); whole without `top`."""
        operand = new_operand(self.dtype, *x.shape)
        put_rows(operand, x.astype(np.float32))
        products = np.full((len(x) + ROWS_IN_LEVELS, len(self.weight)), np.nan, np.float32)
        logits = products[: len(x)]
        warpers = warpers_of(len(x), top_k=top * (len(x) // len(top)), num_tokens=num_tokens) if top else None
        buffers = SimpleNamespace(screen=self.screen, logits=logits)
        plan_screen(SimpleNamespace(lm_head=self.head), buffers, lambda: warpers)
        self._team.run(take_heads, self.head, self.segments, logits, operand, self.screen, products)
        return logits

    def check(self, x: np.ndarray, top: int, num_tokens: int = SHAPE[0]) -> np.ndarray:
        """Compare both. Return the screened logits."""
        expected = self.logits(x)
        self.screen.calls[0] = 0
        found = self.logits(x, top, num_tokens=num_tokens)
        is_computed = found != -np.inf
        np.testing.assert_array_equal(
            found.view(np.uint32)[is_computed], expected.view(np.uint32)[is_computed]
        )
        for row, other in zip(expected, found, strict=True):
            if np.isfinite(row).all():
                row = row[:num_tokens]
                assert (other > -np.inf)[:num_tokens][row >= np.partition(row, -top)[-top]].all()
            else:
                same_bits(other, row)
        return found

    @property
    def is_screened(self) -> bool:
        return 2 * self.screen.is_wanted.sum() <= self.screen.is_wanted.size


def random_head(random: np.random.Generator, n: int = SHAPE[0], k: int = SHAPE[1]) -> np.ndarray:
    """Rows with a common part and large channels, some of them alike to the last bit but one."""
    head = random.normal(0, 0.12, (n, k)) + random.normal(0, 0.05, k)
    head[:, random.integers(0, k, 3)] += (0.6, -0.4, 0.9)
    return head.astype(np.float32)


def random_states(random: np.random.Generator, count: int, k: int = SHAPE[1]) -> np.ndarray:
    return random.normal(0, 1, (count, k)) * random.lognormal(0.5, 0.6, k)


@pytest.fixture(autouse=True)
def small_heads(monkeypatch):
    monkeypatch.setattr(screen_pack, "LEAST_SIZE", 0)


# A head of float16 compiles, too, and has the steps of bfloat16's.
@pytest.fixture(scope="module", params=daily(SCREENED, ["float32", "bfloat16"]))
def dtype(request) -> str:
    return request.param


@pytest.mark.parametrize("threads", [1, 2])
def test_bits(dtype, threads):
    random = np.random.default_rng(threads)
    head = Head(random_head(random), dtype, threads)
    for count in (1, 2, 3, 4, 6, 7, 32):
        for top in (1, 40):
            found = head.check(random_states(random, count) * 6, top)
            assert np.isneginf(found).any() == (0 in head.screen.is_wanted)
            if top == 1:
                assert head.is_screened == (count <= (3 if dtype == "bfloat16" else 7))


def test_rows_that_are_alike_or_differ_in_the_last_bit(dtype):
    random = np.random.default_rng(3)
    weight = random_head(random)
    x = random_states(random, 3)
    best = (weight @ x[0]).argmax()
    places = [0, 5, 64, 2000, SHAPE[0] - 1]
    weight[places] = weight[best]
    weight[77] = np.nextafter(weight[best], np.float32(np.inf))
    weight[78] = np.nextafter(weight[best], np.float32(-np.inf))
    head = Head(weight, dtype)
    for top in (1, 2, 5, 40):
        found = head.check(x, top)
        assert head.is_screened or top == 40
        assert (found[0, places] == found[0, best]).all()


@pytest.mark.parametrize("num_tokens", [4352, 4300, 64, 1])
def test_greatest_logits_of_no_token(dtype, num_tokens):
    """Rows of no token, which are the greatest, neither hide the tokens' nor are computed for themselves."""
    random = np.random.default_rng(5)
    weight = random_head(random)
    x = random_states(random, 3) * 6
    weight[num_tokens:] = 9 * x[0] / np.linalg.norm(x[0])
    head = Head(weight, dtype)
    for top in (1, 4):
        found = head.check(x, min(top, num_tokens), num_tokens)
        assert np.isneginf(found[:, num_tokens + 64 :]).all()


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-15, 1e15, 1e30, 1e36])
def test_sizes_of_states_and_heads(dtype, size):
    random = np.random.default_rng(4)
    states = random_states(random, 5)
    weight = random_head(random)
    Head(weight, dtype).check(states * size, 1)
    if dtype != "float16":
        Head(weight * np.float32(size), dtype).check(states, 5)
        Head(weight * np.float32(size), dtype).check(states / size, 5)


def test_numbers_that_are_not_finite(dtype):
    random = np.random.default_rng(5)
    head = Head(random_head(random), dtype)
    for bad in (np.nan, np.inf, -np.inf):
        states = random_states(random, 4)
        states[1, 3] = bad
        head.check(states, 1)
        assert not head.is_screened
        weight = random_head(random)
        weight[7, 2] = bad
        whole_head = Head(weight, dtype)
        whole_head.check(random_states(random, 1), 1)
        assert np.isinf(whole_head.screen.largest[0])


def test_a_zero_head_and_zero_states(dtype):
    random = np.random.default_rng(6)
    Head(np.zeros(SHAPE, np.float32), dtype).check(random_states(random, 2), 1)
    Head(random_head(random), dtype).check(np.zeros((2, SHAPE[1])), 1)


def test_when_all_rows_are_wanted():
    head = Head(random_head(np.random.default_rng(7)), "float32")
    states = random_states(np.random.default_rng(8), 2)
    for top in ((1, 0), (1, 65), ()):
        assert np.isfinite(head.logits(states, *top)).all()
    head.screen.calls[0] = 0
    assert np.isneginf(head.logits(states, 1, 1)).any()


def test_calls_after_one_in_vain_have_no_screen():
    head = Head(np.ones(SHAPE, np.float32), "float32")
    states = np.ones((1, SHAPE[1]))
    screened = [bool(head.logits(states, 1).any() and head.screen.rows[0]) for _ in range(14)]
    assert screened == [call in (0, 1, 3, 7) for call in range(14)]


def test_calls_that_want_a_screen_pack_it():
    head = Head(random_head(np.random.default_rng(10)), "float32")
    whole_screen, head.screen = head.screen, new_screen(32, *SHAPE)
    states = random_states(np.random.default_rng(11), 1)
    later = [((1,), count) for count in range(2, PARTS["float32"] + 1)]
    for top, num_packed in (((), -1), ((65,), -1), ((1,), 0), ((1,), 1), ((), 1), *later):
        assert np.isfinite(head.logits(states, *top)).all()
        assert head.screen.num_packed[0] == num_packed
    np.testing.assert_array_equal(head.screen.head.weight.panels, whole_screen.head.weight.panels)
    assert np.isneginf(head.logits(states, 1)).any()


@pytest.mark.parametrize(("threads", "size"), [(1, 1), (2, 1), (1, 1e-30), (1, 1e-37)])
def test_packed_rows_and_their_bounds(dtype, threads, size):
    """A row less the mean is t q and a rest: q is nearest, and the bounds of both are true and, by float64, close."""
    n, k = SHAPE
    head = Head(random_head(np.random.default_rng(14)) * np.float32(size), dtype, threads)
    screen = head.screen
    rows = unpacked(head.head.weight, dtype)[:n, :k] - screen.mean.astype(np.float64)
    levels = unpacked(screen.head.weight, "int8")[:n, :k]
    lost, sizes = (np.linalg.norm(part, axis=1) for part in (rows - levels, levels))
    assert (lost <= screen.lost[:n]).all()
    assert (sizes <= screen.sizes[:n]).all()
    if size == 1:
        scales = screen.head.weight.scales[0, :n, None].astype(np.float64)
        assert (np.abs(rows - levels) <= 0.5001 * scales).all()
        assert (np.abs(levels).max(axis=1, keepdims=True) == 127 * scales).all()
        whole_sizes = np.linalg.norm(screen.mean.astype(np.float64)) + sizes + lost
        assert (screen.lost[:n] <= lost + 2e-5 * whole_sizes).all()
        assert (screen.sizes[:n] <= 1.00001 * sizes).all()


@pytest.mark.parametrize("size", [1e29, 1e31, 1e32, 1e33, 1e34, 1e35, 1e36])
@pytest.mark.parametrize("count", [1, 4])
def test_int8_sums_that_overflow(dtype, count, size):
    """A row of small scale points along the state, so that its sum without the scale is the greatest of all."""
    along = np.sign(np.random.default_rng(12).normal(size=SHAPE[1]))
    along[0] = 0
    weight = np.random.default_rng(13).normal(0, 1e-3, SHAPE)
    weight -= np.outer(weight @ along / (along @ along), along)
    weight[100] = 1e-6 * along
    weight[2000] = 1e-4 * along
    weight[2000, 0] = 0.5
    Head(weight.astype(np.float32), dtype).check(np.tile(along * size, (count, 1)), 1)


def check_random_steps(count: int) -> dict[str, float]:
    """Compare random steps of random heads. Return how many were screened, and the panels of all."""
    random = np.random.default_rng(9)
    seen = {"steps": 0, "screened": 0, "panels": 0, "computed": 0}
    while seen["steps"] < count:
        n = int(random.integers(4096, 9000))
        k = int(random.choice([33, 64, 70, 200, 768]))
        weight = random_head(random, n, k)
        if random.random() < 0.5:
            weight[random.integers(0, n, 30)] = weight[random.integers(0, n, 30)]
            weight[random.integers(0, n, 9)] = np.nextafter(weight[random.integers(0, n, 9)], np.float32(9))
        head = Head(weight, str(random.choice(SCREENED)), int(random.integers(1, 3)))
        for _ in range(20):
            rows = int(random.choice([1, 2, 3] if head.dtype == "bfloat16" else [1, 2, 3, 5, 7, 32]))
            states = random_states(random, rows, k) * random.choice([1, 4, 1e-30, 1e30])
            if random.random() < 0.1:
                states[random.integers(len(states)), random.integers(k)] = np.nan
            head.check(states, int(random.choice([1, 1, 2, 5, 40, 64])))
            seen["steps"] += 1
            seen["screened"] += head.is_screened
            seen["panels"] += head.screen.is_wanted.size
            seen["computed"] += head.screen.is_wanted.sum()
    return seen


def test_random_steps():
    seen = check_random_steps(40)
    assert seen["screened"] > seen["steps"] // 4


if __name__ == "__main__":
    screen_pack.LEAST_SIZE = 0
    print(check_random_steps(int(sys.argv[1])))
