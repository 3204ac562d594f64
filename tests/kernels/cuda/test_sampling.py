"""The CUDA kernels that choose tokens against the reference."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from support.cuda_device import SimulatedDevice
from support.examples import examples
from support.kernel_tools import ROWS as FINITE_ROWS
from support.kernel_tools import masked_row, random_row, tied_row, warpers_of
from support.ptx_machine import simulate
from support.tables import column
from tinygpt.kernels import reference
from tinygpt.kernels.cuda.device import Graphs
from tinygpt.kernels.cuda.draw import UNITS, draw_tokens, least_mass_above
from tinygpt.kernels.cuda.draw_arithmetic import POWERS, POWERS_SIZE, random_fraction, weight_of, write_power
from tinygpt.kernels.cuda.jit import kernel
from tinygpt.kernels.cuda.sampling import DeviceLogits, sample, take_greatest
from tinygpt.kernels.cuda.workspace import MaxShape, new_sampling_buffers
from tinygpt.kernels.numbers import ALL_TOKENS, Warpers

pytestmark = pytest.mark.usefixtures("compute_capability")

THREADS = 64


def spoilt_row(vocab, seed):
    row = random_row(vocab, seed)
    row[seed % vocab] = np.float32([np.nan, -np.nan, np.inf, 3e38, -3e38])[seed % 5]
    return row


def nothing_row(vocab, seed):
    return np.full(vocab, -np.inf, np.float32)


ROWS = [*FINITE_ROWS, spoilt_row, nothing_row]


def take(logits, pieces=3, threads=THREADS, rows=None, num_tokens=ALL_TOKENS):
    rows = np.arange(len(logits), dtype=np.int32) if rows is None else rows
    token_ids = np.full(len(rows), -9, np.int32)
    arrivals = np.zeros(len(rows), np.uint32)
    keys = np.full(len(rows) * pieces, np.iinfo(np.int64).max)
    grid = (pieces, len(rows))
    vocab_size = logits.shape[1]
    arrays = rows, np.full(len(rows), num_tokens, np.int32), keys, arrivals, token_ids
    simulate(take_greatest, grid, threads, logits.ravel(), vocab_size, *arrays)
    assert not arrivals.any()
    return token_ids


def choose(logits, warpers, seeds, sample_indices, positions, threads=THREADS):
    """The tokens, and the scores that the filters leave."""
    count, vocab_size = logits.shape
    rows = np.arange(count, dtype=np.int32)
    num_tokens = warpers.num_tokens.astype(np.int32)
    token_ids = take(logits, num_tokens=num_tokens)
    scores = np.full(logits.size, np.nan, np.float32)
    ids = np.full(logits.size, -1, np.int32)
    draws = np.uint64(seeds), np.uint64(sample_indices), np.int32(positions)
    columns = warpers.temperature, warpers.top_k, warpers.top_p, warpers.min_p
    settings_of_rows = np.stack(columns, axis=1).ravel()
    arrays = rows, num_tokens, settings_of_rows, *draws, scores, ids, token_ids
    simulate(draw_tokens, count, threads, logits.ravel(), vocab_size, count, *arrays)
    return token_ids, scores.reshape(logits.shape)


def assert_as_the_reference(logits, warpers, seed=0, threads=THREADS):
    count = len(logits)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, 2**64, count, np.uint64), rng.integers(0, 5, count), rng.integers(0, 1024, count)
    token_ids, scores = choose(logits, warpers, *draws, threads=threads)
    with np.errstate(all="ignore"):
        wanted = reference.sample(logits, warpers, *draws)
        np.testing.assert_array_equal(token_ids, wanted)
        for r in np.flatnonzero((wanted >= 0) & (warpers.temperature > 0)):
            filtered = reference.filter_logits(
                logits[r : r + 1], Warpers(*(field[r : r + 1] for field in warpers))
            )
            count = int(warpers.num_tokens[r])
            np.testing.assert_array_equal(scores[r, :count], filtered[0, :count])


@pytest.mark.parametrize("vocab", [1, 37, 130, 257])
def test_the_greatest_logit_is_taken_as_by_the_reference(vocab):
    logits = np.stack([make_row(vocab, seed) for make_row in ROWS for seed in range(5)])
    zeros = np.zeros(len(logits), np.int64)
    with np.errstate(invalid="ignore"):
        wanted = reference.sample(logits, warpers_of(len(logits), temperature=0), zeros, zeros, zeros)
    assert set(wanted) >= {-1, 0}
    for pieces in (1, 2, 5):
        np.testing.assert_array_equal(take(logits, pieces), wanted)


def test_zeros_tie_whatever_their_sign():
    row = np.full((2, 40), -1, np.float32)
    row[0, [7, 30]] = (-0.0, 0.0)
    row[1, [7, 30]] = (0.0, -0.0)
    assert take(row).tolist() == [7, 7]


def test_scores_past_the_tokens_change_nothing():
    logits = np.stack([make_row(130, seed) for make_row in ROWS for seed in range(5)])
    counts = np.resize([130, 129, 64, 3, 1], len(logits))
    expected = [take(row[None, :count]).item() for row, count in zip(logits, counts, strict=True)]
    assert take(logits, num_tokens=counts).tolist() == expected


def test_any_row_may_be_asked_for_and_surplus_ones_are_left():
    logits = np.stack([random_row(50, seed) for seed in range(4)])
    best = logits.argmax(axis=1)
    assert take(logits, rows=np.int32([3, -1, 0, 3])).tolist() == [best[3], -9, best[0], best[3]]


@kernel
def write_fractions(seeds, sample_indices, positions, fractions):
    fractions[0] = random_fraction(seeds[0], sample_indices[0], positions[0])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 2))
@settings(max_examples=examples(50), deadline=None)
def test_the_random_number_is_numpys(seed, sample_index, position):
    fractions = np.zeros(1, np.uint64)
    draws = np.array([seed], np.uint64), np.array([sample_index], np.uint64), np.array([position], np.int32)
    simulate(write_fractions, 1, 1, *draws, fractions)
    assert fractions[0] * 2.0**-64 == reference.sampling.uniform(seed, sample_index, position)


@kernel
def write_weights(scores, greatest, powers, highs, lows, exponents):
    i = cuda.threadIdx.x
    if i < POWERS:
        write_power(powers, i)
    cuda.syncthreads()
    highs[i], lows[i], exponents[i] = weight_of(scores[i], greatest[i], powers)


@given(st.lists(st.tuples(st.floats(-60, 60, width=32), st.floats(0, 86, width=32)), min_size=1))
@settings(max_examples=examples(50), deadline=None)
def test_weights_are_exact_to_43_bits(pairs):
    greatest, below = np.float32(pairs).T
    scores = np.resize(greatest - below, 64)
    greatest = np.resize(greatest, 64)
    highs, lows = np.zeros((2, 64), np.float32)
    exponents = np.zeros(64, np.int32)
    simulate(
        write_weights, 1, 64, scores, greatest, np.zeros(POWERS_SIZE, np.float32), highs, lows, exponents
    )
    found = np.ldexp(highs.astype(np.float64) + lows, exponents)
    np.testing.assert_allclose(found, np.exp(scores.astype(np.float64) - greatest), rtol=0, atol=2.0**-43)


@kernel
def write_least_mass(bound, masses):
    masses[0] = least_mass_above(bound)


@given(st.floats(0, 1, width=32))
@settings(max_examples=examples(200), deadline=None)
def test_a_mass_exceeds_a_bound_if_it_does_in_float32(bound):
    masses = np.zeros(1, np.int64)
    simulate(write_least_mass, 1, 1, np.float32(bound), masses)
    # A float64 holds a mass in 53 bits: it is rounded there first.
    step = max(1, int(masses[0]) >> 52)
    assert np.float32((int(masses[0]) + step) / UNITS) > np.float32(bound)
    assert masses[0] == 1 or not np.float32((int(masses[0]) - step) / UNITS) > np.float32(bound)


USUAL = column("""
{}
{"temperature": 0.7, "top_k": 5}
{"temperature": 1.3, "top_p": 0.9}
{"temperature": 0.8, "top_k": 40, "top_p": 0.95}
{"top_k": 1, "top_p": 0.5}
{"top_k": 1000000, "top_p": 1e-9}
{"temperature": 1e-6, "top_p": 0.9}
{"temperature": 1e6, "top_p": 0.3}
{"top_p": 0.999999}
{"top_p": 0.999999999999}
{"min_p": 0.05}
{"min_p": 1.0}
{"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.03}
""")


@pytest.mark.parametrize("vocab", [5, 37, 130, 257])
@pytest.mark.parametrize("setting", USUAL, ids=str)
def test_tokens_and_filtered_scores_are_the_references(setting, vocab):
    rows = ROWS if vocab < 130 else [random_row, tied_row, masked_row]
    logits = np.stack([make_row(vocab, len(setting)) for make_row in rows])
    assert_as_the_reference(logits, warpers_of(len(logits), **setting), seed=vocab)


def test_round_values_of_p_meet_the_border_as_in_float32():
    """0.1 + 0.1 + 0.1 against 1 - 0.7: the sums are the reference's only if the roundings are."""
    percents = np.arange(1, 100, 7)
    for vocab in (3, 10, 12):
        logits = np.zeros((len(percents), vocab), np.float32)
        assert_as_the_reference(logits, warpers_of(len(percents), top_p=percents / 100))


@pytest.mark.parametrize("make_row", [random_row, tied_row])
def test_a_sum_that_meets_its_bound_exactly(make_row):
    row = make_row(37, 2)
    weights = np.exp(row.astype(np.float64) - row.max())
    probabilities = (weights / weights.sum()).astype(np.float32)
    sums = np.cumsum(probabilities[np.argsort(row, kind="stable")], dtype=np.float64).astype(np.float32)
    bounds = sums[[0, 3, 9, 20, 33]].astype(np.float64)
    assert_as_the_reference(np.repeat(row[None], 5, axis=0), warpers_of(5, top_p=1 - bounds))


def test_a_bound_near_1_is_subtracted_from_1_in_float64():
    logits = np.full((1, 9), -25, np.float32)  # probabilities of 1.4e-11
    logits[0, 4] = 0
    assert_as_the_reference(logits, warpers_of(1, top_p=1 - 1e-10))


def test_of_tokens_tied_at_the_border_of_p_the_highest_ids_stay():
    logits = np.zeros((1, 300), np.float32)
    _, scores = choose(logits, warpers_of(1, top_p=0.5), [0], [0], [0])
    np.testing.assert_array_equal(np.flatnonzero(scores[0] > -np.inf), np.arange(150, 300))


def test_the_number_of_threads_changes_nothing():
    logits = np.stack([random_row(257, seed) for seed in range(4)])
    for threads in (96, 160):
        assert_as_the_reference(logits, warpers_of(4, top_k=100, top_p=0.9), threads=threads)


def test_many_seeds_give_the_references_tokens():
    logits = np.repeat(random_row(130, 5)[None], 100, axis=0)
    assert_as_the_reference(logits, warpers_of(100, temperature=2.0), seed=1)


def test_a_row_that_temperature_makes_infinite_gives_no_token():
    logits = np.float32([[1, -1, 0], [-1, -2, -3], [1e30, 0, 0], [-np.inf, 0, -1]])
    warpers = warpers_of(4, temperature=[1e-45, 1e-45, 1e-10, 1e-45])
    token_ids, _ = choose(logits, warpers, [0] * 4, [0] * 4, [0] * 4)
    assert token_ids.tolist()[:3] == [-1, -1, -1]


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_any_settings_give_the_references_tokens(data):
    def of_rows(*values):
        return np.array([data.draw(st.sampled_from(values)) for _ in range(3)], np.float64)

    vocab = data.draw(st.integers(1, 150))
    logits = np.stack(
        [data.draw(st.sampled_from(ROWS))(vocab, data.draw(st.integers(0, 99))) for _ in range(3)]
    )
    warpers = warpers_of(
        3,
        temperature=of_rows(1, 0, 0.7, 2),
        top_k=of_rows(0, 1, 5, 40),
        top_p=of_rows(1, 0.1, 0.5, 0.9, 0.99),
        min_p=of_rows(0, 0.02, 0.3),
        num_tokens=of_rows(ALL_TOKENS, vocab, max(vocab - 3, 1), 1),
    )
    device = SimulatedDevice()
    max_shape = MaxShape(3, 3, 3, 8)
    sampling = new_sampling_buffers(device, SimpleNamespace(vocab_size=vocab), max_shape)
    workspace = SimpleNamespace(
        device=device,
        logits=logits.ravel().copy(),
        sampling=sampling,
        max_shape=max_shape,
        graphs=Graphs(device),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    draws = rng.integers(0, 2**64, 3, np.uint64), rng.integers(0, 5, 3), rng.integers(0, 1024, 3)
    with np.errstate(all="ignore"):
        wanted = reference.sample(logits, warpers, *draws)
        token_ids = sample(DeviceLogits(workspace, np.arange(3), vocab, {0, 1, 2}), warpers, *draws)
    np.testing.assert_array_equal(token_ids, wanted)


def test_a_steps_own_token_stays_if_it_is_of_a_rows_first_scores():
    device = SimulatedDevice()
    max_shape = MaxShape(3, 3, 3, 8)
    sampling = new_sampling_buffers(device, SimpleNamespace(vocab_size=40), max_shape)
    logits = np.stack([random_row(40, seed) for seed in range(3)])
    workspace = SimpleNamespace(
        device=device,
        logits=logits.ravel().copy(),
        sampling=sampling,
        max_shape=max_shape,
        graphs=Graphs(device),
    )
    best = logits.argmax(1)
    sampling.step_token_ids[:] = best
    zeros = np.zeros(3, np.int64)
    rows = DeviceLogits(workspace, np.arange(3), 40)
    assert (
        sample(rows, warpers_of(3, temperature=0, num_tokens=best + 1), zeros, zeros, zeros).tolist()
        == best.tolist()
    )
    assert device.now == 0  # nothing was launched
    lower = [row[:count].argmax() for row, count in zip(logits, best, strict=True)]
    assert sample(rows, warpers_of(3, temperature=0, num_tokens=best), zeros, zeros, zeros).tolist() == lower
