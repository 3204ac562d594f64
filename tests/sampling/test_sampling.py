"""Filters against Hugging Face's own, the CPU kernels against the reference, and the draws against statistics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from support.examples import examples
from support.kernel_tools import ROWS, extreme_row, masked_row, random_row, warpers_of
from support.recorded import HAS_TRANSFORMERS, recorded
from support.sampling import BACKENDS, filtered_by
from support.tables import column
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.cpu.sampling import STRIDE
from tinygpt.kernels.cpu.sampling import _draw as cpu_draw

if HAS_TRANSFORMERS:
    import torch
    from transformers import (
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )

GPT2_VOCAB = 50257
SETTINGS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.9), (0.8, 40, 0.95), (2.0, 3, 0.5), (0.1, 1000, 0.99)]
SETTINGS += [(1.0, 1, 0.5), (1.0, 0, 1e-9), (1e-6, 0, 0.9), (1e6, 0, 0.3), (1.0, 10**6, 1 - 1e-6)]


@recorded(varies=True)
def warped(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0, typical_p=1, epsilon_cutoff=0, eta_cutoff=0):
    warpers = [TemperatureLogitsWarper(float(temperature))]
    warpers += [TopKLogitsWarper(int(top_k))] if top_k > 0 else []
    warpers += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []
    warpers += [MinPLogitsWarper(float(min_p))] if min_p > 0 else []
    warpers += [TypicalLogitsWarper(float(typical_p))] if typical_p < 1 else []
    warpers += [EpsilonLogitsWarper(float(epsilon_cutoff))] if epsilon_cutoff > 0 else []
    warpers += [EtaLogitsWarper(float(eta_cutoff))] if eta_cutoff > 0 else []
    scores = torch.from_numpy(row.copy())[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].numpy()


def one_row(backend, row, temperature=1.0, top_k=0, top_p=1.0, **others):
    return filtered_by(backend, row, temperature=temperature, top_k=top_k, top_p=top_p, **others)


def draw(backend, logits, *setting, seeds=0, sample_indices=0, positions=0, **others):
    numbers = [np.broadcast_to(number, len(logits)) for number in (seeds, sample_indices, positions)]
    return backend.sample(logits, warpers_of(len(logits), *setting, **others), *numbers)


@BACKENDS
@pytest.mark.parametrize("make_row", ROWS)
@pytest.mark.parametrize("vocab", [1, 2, 5, 16])
def test_small_rows_equal_huggingface_to_the_bit(backend, make_row, vocab):
    """Ties included: torch sorts rows of 16 or fewer stably."""
    for seed in range(8):
        row = make_row(vocab, seed)
        for setting in SETTINGS:
            np.testing.assert_array_equal(one_row(backend, row, *setting), warped(row, *setting))


@BACKENDS
@pytest.mark.parametrize("setting", [(0.0, 0, 1.0), *SETTINGS])
def test_scores_past_the_tokens_change_nothing(backend, setting):
    logits = np.stack([make_row(100, seed) for make_row in ROWS for seed in range(3)])
    count = len(logits)
    seeds = np.arange(count)
    expected = draw(backend, logits, *setting, seeds=seeds)
    filtered = backend.filter_logits(logits, warpers_of(count, *setting))
    rest = [np.full((count, 9), odd, np.float32) for odd in (5e4, np.inf, np.nan)]
    for padded in (np.concatenate([logits, columns], axis=1) for columns in rest):
        np.testing.assert_array_equal(draw(backend, padded, *setting, seeds=seeds, num_tokens=100), expected)
        found = backend.filter_logits(padded, warpers_of(count, *setting, num_tokens=100))
        np.testing.assert_array_equal(found[:, :100], filtered)
        assert np.isneginf(found[:, 100:]).all()


@BACKENDS
@pytest.mark.parametrize("make_row", ROWS)
@pytest.mark.parametrize("vocab", [17, 100, 1001, GPT2_VOCAB])
def test_large_rows_keep_as_many_as_huggingface_and_the_most_probable(backend, make_row, vocab):
    """Compare the number of tokens that stay: torch's sort of more than 16 scores is not stable.

    For a large vocabulary torch computes in float64, as its float32 softmax depends on the CPU, and p moves by 1e-5.
    """
    for temperature, top_k, top_p in SETTINGS:
        row = make_row(vocab, 3)
        ours = one_row(backend, row, temperature, top_k, top_p)
        kept = np.sum(ours > -np.inf)
        precision = np.float64 if vocab > 1001 else np.float32
        slack = 1e-5 if vocab > 1001 and top_p < 1 else 0.0
        scaled = row / np.float32(temperature)
        fewer, more = (
            np.sum(warped(scaled.astype(precision), 1.0, top_k, np.clip(p, 0, 1)) > -np.inf)
            for p in (top_p - slack, top_p + slack)
        )
        assert fewer <= kept <= more
        np.testing.assert_array_equal(np.sort(ours)[-kept:], np.sort(scaled)[-kept:])
        np.testing.assert_array_equal(ours[ours > -np.inf], scaled[ours > -np.inf])


@BACKENDS
def test_of_tokens_tied_at_the_border_of_p_the_highest_ids_stay(backend):
    ours = one_row(backend, np.zeros(40, np.float32), 1.0, 0, 0.5)
    np.testing.assert_array_equal(np.flatnonzero(ours > -np.inf), np.arange(20, 40))


@BACKENDS
@pytest.mark.parametrize("vocab", [2, 65, 129])  # blocks of one score are blocks too
def test_top_k_tells_neighbouring_scores_apart_wherever_the_greatest_is(backend, vocab):
    greatest = np.random.default_rng(vocab).standard_normal(32).astype(np.float32)
    rows = np.repeat(np.nextafter(greatest, np.float32(-np.inf))[:, None], vocab, 1)  # (32, V)
    rows[:, -1] = greatest
    kept = np.isfinite(backend.filter_logits(rows, warpers_of(32, top_k=1)))
    assert [np.flatnonzero(row).tolist() for row in kept] == [[vocab - 1]] * 32


@pytest.mark.parametrize(
    ("rule", "cases"),
    [
        ("hf", [(0.3, [1]), (0.6, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (0.96, [0, 1, 2, 3])]),
        ("openai", [(0.3, [1]), (0.6, [1]), (0.79, [1]), (0.81, [1, 3]), (0.96, [0, 1, 3])]),
    ],
)
def test_the_token_that_crosses_p_is_kept_or_left_out_by_the_rule(rule, cases):
    row = np.log(np.float32([0.15, 0.5, 0.05, 0.3]))
    for top_p, kept in cases:
        ours = one_row(reference, row, 1.0, 0, top_p, top_p_rule=rule)
        np.testing.assert_array_equal(np.flatnonzero(ours > -np.inf), kept)


# The other warpers, against Hugging Face; probabilities that are no round numbers, since torch's have other roundings.

OTHERS = column("""
{"min_p": 0.0123}
{"min_p": 0.77}
{"min_p": 1.0}
{"typical_p": 0.2345}
{"typical_p": 0.9123}
{"typical_p": 1e-9}
{"epsilon_cutoff": 0.0123}
{"epsilon_cutoff": 0.9}
{"eta_cutoff": 0.0123}
{"eta_cutoff": 0.9}
{"temperature": 0.7, "top_k": 9, "top_p": 0.9123, "min_p": 0.0312, "typical_p": 0.8123}
{"temperature": 1.7, "top_p": 0.9123, "typical_p": 0.7123, "epsilon_cutoff": 0.0213, "eta_cutoff": 0.0923}
""")


@BACKENDS
@pytest.mark.parametrize("make_row", ROWS)
@pytest.mark.parametrize("setting", OTHERS, ids=str)
def test_other_warpers_equal_huggingface_to_the_bit(backend, setting, make_row):
    for vocab in (1, 2, 5, 16):
        for seed in range(6):
            row = make_row(vocab, seed)
            np.testing.assert_array_equal(one_row(backend, row, **setting), warped(row, **setting))


@BACKENDS
@pytest.mark.parametrize("setting", OTHERS[:10], ids=str)
def test_other_warpers_keep_as_many_of_a_full_vocabulary_as_huggingface(backend, setting):
    """Compare with torch in float64; the limit is moved by 1e-5 of itself to either side, for our float32 filters."""
    ((name, limit),) = setting.items()
    for row in (random_row(GPT2_VOCAB, 3), masked_row(GPT2_VOCAB, 4)):
        kept = np.sum(one_row(backend, row, **setting) > -np.inf)
        exact = row.astype(np.float64)
        bounds = [
            np.sum(warped(exact, **{name: min(limit * factor, 1 - 1e-6)}) > -np.inf)
            for factor in (0.99999, 1.00001)
        ]
        assert min(bounds) <= kept <= max(bounds)


def part_within_p(row, p):
    """FasterTransformer: u * p is looked up in the sums, greatest first; the probability that each token is found."""
    probabilities = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    found, before = np.zeros(row.size), 0.0
    for i in np.argsort(-row, kind="stable"):
        found[i] = min(probabilities[i], max(p - before, 0)) / p
        before += probabilities[i]
    return found


@pytest.mark.parametrize("make_row", [make_row for make_row in ROWS if make_row is not extreme_row])
def test_fastertransformers_rule_gives_the_probabilities_of_its_draw(make_row):
    """Up to the float32 of the scores, which are 0.001 apart in an extreme row."""
    for seed in range(20):
        row = make_row(40, seed)
        p = 0.0123 + 0.04711 * seed
        ours = one_row(reference, row, top_p=p, top_p_rule="fastertransformer").astype(np.float64)
        probabilities = np.exp(ours - ours.max()) / np.exp(ours - ours.max()).sum()
        expected = part_within_p(row - row.max(), p)
        np.testing.assert_allclose(probabilities, expected, atol=1e-6)
        np.testing.assert_array_equal((ours > -np.inf)[expected > 1e-6], True)


scores = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([-1e4, 1e4, -np.inf, 0.0, -0.0, 1.0, 1.0000001, 3.0e38, -3.0e38, 1e-45]),
)
any_row = arrays.arrays(np.float32, st.integers(1, 300), elements=scores)


@settings(max_examples=examples(300), deadline=None)
@given(
    row=any_row,
    temperature=st.sampled_from([1.0, 0.5, 0.7, 3.0, 1e-3, 1e8]),
    top_k=st.integers(0, 310),
    top_p=st.one_of(st.floats(1e-6, 1.0), st.sampled_from([1.0, 0.5, 0.9, 0.75])),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    seed=st.integers(0, 2**64 - 1),
)
def test_cpu_equals_the_reference(row, temperature, top_k, top_p, min_p, seed):
    setting = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = draw(reference, row[None], **setting, seeds=np.uint64(seed))
    assert draw(cpu, row[None], **setting, seeds=np.uint64(seed)) == expected
    assert draw(cpu, row[None], 0.0) == draw(reference, row[None], 0.0)
    if expected >= 0:
        ours, theirs = (one_row(backend, row, **setting) for backend in (cpu, reference))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("make_row", ROWS)
def test_cpu_equals_the_reference_on_a_full_vocabulary(make_row):
    row = make_row(GPT2_VOCAB, 5)
    for min_p in (0.0123, 0.77, 1.0):
        ours, theirs = (one_row(backend, row, min_p=min_p) for backend in (cpu, reference))
        np.testing.assert_array_equal(ours, theirs)
    for setting in SETTINGS:
        np.testing.assert_array_equal(one_row(cpu, row, *setting), one_row(reference, row, *setting))
        logits = np.stack([row] * 3)
        ours, theirs = (draw(backend, logits, *setting, positions=[1, 2, 3]) for backend in (cpu, reference))
        np.testing.assert_array_equal(ours, theirs)


def test_cpu_exponential_is_as_good_as_libm():
    from tinygpt.kernels.cpu.sampling_rows import exponential

    x = np.concatenate([-np.geomspace(1e-18, 699, 5000), [0.0, -0.5, -np.log(2), -700.0]])
    np.testing.assert_allclose([exponential(value) for value in x], np.exp(x), rtol=5e-16)
    assert exponential(-700.1) == exponential(-np.inf) == 0


@BACKENDS
def test_uniform_numbers_are_numpys_philox(backend):
    uniform = backend.sampling.uniform
    for key in [(0, 0), (1, 2), (2**64 - 1, 3), (2**63, 2**64 - 1)]:
        for position in [0, 1, 1023, 2**40]:
            numbers = [np.uint64(number) for number in (*key, position)]
            counter = np.array([position, 0, 0, 0], np.uint64)
            key_words = np.array(key, np.uint64)
            philox = np.random.Philox(key=key_words, counter=counter)
            assert uniform(*numbers) == np.random.Generator(philox).random()


def test_philox_equals_its_published_vector():
    """Philox4x64-10 of all ones, from Random123's known-answer tests (kat_vectors)."""
    from tinygpt.kernels.cpu.sampling import uniform

    ones = np.uint64(2**64 - 1)
    vector = np.random.Philox(key=[ones, ones], counter=np.array([ones - np.uint64(1), ones, ones, ones]))
    assert vector.random_raw() == 0x87B092C3013FE90B
    # With the counter at 0, as for the position before the first.
    assert uniform(np.uint64(0), np.uint64(0), ones) == (0x16554D9ECA36314C >> 11) * 2.0**-53


@BACKENDS
@pytest.mark.parametrize("setting", [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8)])
def test_draws_follow_the_filtered_distribution(backend, setting):
    """Chi-square below its 99.9 % quantile; the draws are fixed, so this passes always or never."""
    row, draws = random_row(12, 1, spread=1.0), 4000
    token_ids = draw(backend, np.tile(row, (draws, 1)), *setting, seeds=11, positions=np.arange(draws))
    filtered = warped(row, *setting).astype(np.float64)
    expected = np.exp(filtered) / np.exp(filtered).sum() * draws
    counts = np.bincount(token_ids, minlength=12)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < {5: 18.5, 6: 20.5, 7: 22.5, 8: 24.3, 9: 26.1, 12: 31.3}[kept.sum()]


@BACKENDS
def test_each_of_seed_sample_and_position_matters(backend):
    logits = np.zeros((60, 1000), np.float32)
    numbers = np.arange(60)
    for name in ("seeds", "sample_indices", "positions"):
        assert len(set(draw(backend, logits, **{name: numbers}).tolist())) > 50


@BACKENDS
def test_greedy_takes_the_lowest_of_tied_ids(backend):
    logits = np.full((3, 5000), -1.0, np.float32)
    logits[0, [1500, 4000]] = 2.0
    logits[1, [7, 3000]] = -0.0, 0.0
    assert draw(backend, logits, 0.0).tolist() == [1500, 7, 0]


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, "all -inf"])
def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_not(backend, temperature, bad):
    logits = np.stack([random_row(300, seed) for seed in range(3)])
    clean = draw(backend, logits, temperature, top_k=40, top_p=0.9)
    if bad == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 299] = bad
    token_ids = draw(backend, logits, temperature, top_k=40, top_p=0.9)
    assert token_ids.tolist() == [clean[0], -1, clean[2]]
    assert token_ids.dtype == np.int32
    assert draw(backend, logits[1:2], temperature, top_k=40, top_p=0.9).tolist() == [-1]


GREATEST = np.nextafter(1.0, 0.0)  # of the numbers that are drawn
NUMBERS = (0.0, 0.2, 0.25, 0.5, 0.75, GREATEST)
DRAWN = [0, 0, 1, 2, 3, 3]  # of four equal weights


def test_the_cumulated_weight_must_exceed_the_number():
    assert [cpu_draw(np.ones(4), number) for number in NUMBERS] == DRAWN


def test_so_it_must_in_the_reference(monkeypatch):
    numbers = iter(NUMBERS)
    monkeypatch.setattr(reference.sampling, "uniform", lambda *of: next(numbers))
    assert draw(reference, np.zeros((len(NUMBERS), 4), np.float32)).tolist() == DRAWN


@pytest.mark.parametrize("number", [0.0, 0.5, GREATEST])
def test_a_weight_of_zero_is_never_drawn(number):
    assert cpu_draw(np.array([0.0, 1.0, 0.0, 0.0]), number) == 1


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_rounding_leads_neither_past_the_last_weight_nor_to_a_zero(zeros):
    """Weights added up in another order than all of them may fall short of the goal, and some of these do."""
    rng = np.random.default_rng(zeros)
    for _ in range(100):
        weights = rng.random(2 * STRIDE) + 0.1
        weights[2 * STRIDE - zeros :] = 0
        assert cpu_draw(weights, GREATEST) == 2 * STRIDE - zeros - 1


@BACKENDS
@pytest.mark.parametrize("make_row", ROWS)
@pytest.mark.parametrize("n", [0, 1, 5, 10**6])
def test_top_logprobs_are_the_log_softmax_of_the_logits(backend, make_row, n):
    row = make_row(1000, 4)
    log_softmax = row - np.float64(row.max())
    log_softmax = log_softmax - np.log(np.exp(log_softmax).sum())
    best = sorted(range(1000), key=lambda i: (-row[i], i))[:n]
    ids, values, value = backend.top_logprobs(row, 17, n)
    assert ids.tolist() == best
    np.testing.assert_allclose(values, log_softmax[best], rtol=0, atol=1e-10)
    np.testing.assert_allclose(value, log_softmax[17], rtol=0, atol=1e-10)
