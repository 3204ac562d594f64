"""Equality at a border: a limit that is exactly a probability, or a sum of them, against Hugging Face's warpers.

A limit is taken where torch's float32 and a softmax in float64, rounded once, are the same number: there, what is kept
depends on the comparison and not on a rounding.
"""

import numpy as np
import pytest
import torch
from transformers import EpsilonLogitsWarper, EtaLogitsWarper, TopPLogitsWarper

from tinygpt.kernels import cpu, reference
from tinygpt.sampling.metadata import Warpers, warpers_of
from tinygpt.sampling_params import SamplingParams

BACKENDS = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
SEEDS = range(12)


def row_of(seed, spread=2.0):
    """Twelve scores; the first two, the last two and two in between are equal."""
    row = (np.random.default_rng(seed).standard_normal(12) * spread).astype(np.float32)
    row[1], row[6], row[11] = row[0], row[5], row[10]
    return row


def kept_by(backend, row, **fields):
    warpers = Warpers(*np.array(warpers_of(SamplingParams(temperature=1.0, **fields)), np.float64)[:, None])
    return np.flatnonzero(backend.filter_logits(row[None], warpers)[0] > -np.inf).tolist()


def kept_by_huggingface(row, warper):
    return np.flatnonzero(warper(None, torch.from_numpy(row.copy())[None])[0] > -np.inf).tolist()


def softmax(row):
    weights = np.exp(row.astype(np.float64) - np.float64(row.max()))
    return weights / weights.sum()


def alike(theirs, ours):
    """The float32 numbers that both agree upon, below 1."""
    theirs, ours = np.asarray(theirs, np.float32), np.asarray(ours).astype(np.float32)
    return sorted(set(theirs[(theirs == ours) & (ours < 1)].tolist()))


def probabilities_of(row):
    return alike(torch.from_numpy(row).softmax(-1), softmax(row))


def sums_of(row, order):
    """Of the probabilities in this order, as torch adds them up, and in float64."""
    theirs = torch.from_numpy(row).softmax(-1)[torch.from_numpy(order.copy())].cumsum(-1)
    return alike(theirs, np.cumsum(softmax(row).astype(np.float32)[order], dtype=np.float64))


def around(limit):
    """The limit, and the next number on either side of it."""
    return [float(np.nextafter(np.float32(limit), np.float32(side))) for side in (0, limit, 1)]


def compared(backend, cases):
    """Ours beside Hugging Face's at each limit; many must change something, or no comparison is seen."""
    changes = 0
    for row, name, limits, warper in cases:
        kept = [kept_by(backend, row, **{name: limit}) for limit in limits]
        assert kept == [kept_by_huggingface(row, warper(limit)) for limit in limits]
        changes += kept[0] != kept[-1]
    assert changes > 10


@BACKENDS
def test_a_probability_at_epsilon_stays(backend):
    rows = [row_of(seed) for seed in SEEDS]
    compared(
        backend,
        [(row, "epsilon_cutoff", around(p), EpsilonLogitsWarper) for row in rows for p in probabilities_of(row)],
    )


@BACKENDS
def test_a_probability_at_eta_stays(backend):
    """Where the distribution is not flat, eta itself is the limit."""
    cases = []
    for row in [row_of(seed, spread=5.0) for seed in SEEDS]:
        probabilities = softmax(row)
        flatness = np.exp(np.sum(probabilities * np.log(probabilities)))
        small = [p for p in probabilities_of(row) if p > 1e-9 and np.sqrt(p) < 0.99 * flatness]
        cases += [(row, "eta_cutoff", around(p), EtaLogitsWarper) for p in small]
    compared(backend, cases)


@BACKENDS
def test_what_adds_up_to_all_but_p_goes(backend):
    """Of two that tie at the border, one; rows this small are sorted stably by torch."""
    cases = []
    for row in [row_of(seed) for seed in SEEDS]:
        sums = sums_of(row, np.argsort(row, kind="stable"))
        limits = [(float(1 - np.float64(s)), s) for s in sums]
        cases += [(row, "top_p", [p], TopPLogitsWarper) for p, s in limits if np.float32(1 - p) == np.float32(s)]
    for row, name, limits, warper in cases:
        (p,) = limits
        assert kept_by(backend, row, **{name: p}) == kept_by_huggingface(row, warper(p))
    assert len(cases) > 10
    for count in range(2, 17):  # all tie
        for goes in range(1, count):
            row, p = np.zeros(count, np.float32), 1 - goes / count
            assert kept_by(backend, row, top_p=p) == kept_by_huggingface(row, TopPLogitsWarper(p))


@BACKENDS
@pytest.mark.parametrize("rule", ["openai", "fastertransformer"])
def test_the_other_rules_keep_what_adds_up_to_p_exactly(backend, rule):
    changes = 0
    for row in [row_of(seed) for seed in SEEDS]:
        order = np.argsort(-row, kind="stable")
        sums = np.cumsum(softmax(row).astype(np.float32)[order], dtype=np.float64).astype(np.float32)
        for limit in sums[sums < 1]:
            for p in around(limit):
                if rule == "openai":
                    last = row[order[max(np.sum(sums <= np.float32(p)) - 1, 0)]]
                    expected = np.flatnonzero(row >= last).tolist()
                else:
                    expected = sorted(order[: np.sum(sums < np.float32(p)) + 1].tolist())
                assert kept_by(backend, row, top_p=p, top_p_rule=rule) == expected, (row, p)
                changes += 1
    assert changes > 100
