"""Equality at a border: a limit that is exactly a probability, or a sum of them, against Hugging Face's warpers.

A limit is taken where torch's float32 and a softmax in float64, rounded once, are the same number: there, what is kept
depends on the comparison and not on a rounding.
"""

import numpy as np

from support.recorded import recorded
from support.sampling import BACKENDS, filtered_by
from tinygpt.kernels import reference

SEEDS = range(12)
ALL_BUT_NOTHING = 1 - 1e-9  # below 1, and 1 in float32: no sum need reach it


def row_of(seed, spread=2.0):
    """Twelve scores; the first two, the last two and two in between are equal."""
    row = (np.random.default_rng(seed).standard_normal(12) * spread).astype(np.float32)
    row[1], row[6], row[11] = row[0], row[5], row[10]
    return row


def kept_by(backend, row, **fields):
    return np.flatnonzero(filtered_by(backend, row, **fields) > -np.inf).tolist()


WARPERS = {
    "epsilon_cutoff": "EpsilonLogitsWarper",
    "eta_cutoff": "EtaLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "typical_p": "TypicalLogitsWarper",
}


@recorded(varies=True)
def kept_at(name, row, limits):
    """(len(limits), V): whether Hugging Face's warper of this name keeps each token."""
    import torch
    import transformers

    warper = getattr(transformers, WARPERS[name])
    scores = torch.from_numpy(row.copy())[None]
    return np.stack([warper(limit)(None, scores)[0].numpy() > -np.inf for limit in limits])


def kept_by_huggingface(name, row, limits):
    return [np.flatnonzero(kept).tolist() for kept in kept_at(name, row, limits)]


@recorded(varies=True)
def torch_softmax(row):
    import torch

    return torch.from_numpy(row.copy()).softmax(-1).numpy()


@recorded(varies=True)
def torch_sums(row, order, is_sorted_first=False):
    """Of the probabilities in this order, which is that of the row or of its softmax."""
    import torch

    row = torch.from_numpy(row.copy())
    order = torch.from_numpy(order.copy())
    return (row[order].softmax(-1) if is_sorted_first else row.softmax(-1)[order]).cumsum(-1).numpy()


@recorded(varies=True)
def torch_distances(row):
    import torch

    theirs = torch.from_numpy(row.copy()).log_softmax(-1)
    return (-theirs + (theirs * theirs.exp()).nansum()).abs().numpy()


def softmax(row):
    weights = np.exp(row.astype(np.float64) - np.float64(row.max()))
    return weights / weights.sum()


def alike(theirs, ours):
    """The float32 numbers that both agree upon, below 1."""
    theirs = np.asarray(theirs, np.float32)
    ours = np.asarray(ours).astype(np.float32)
    return sorted(set(theirs[(theirs == ours) & (ours < 1)].tolist()))


def probabilities_of(row):
    return alike(torch_softmax(row), softmax(row))


def distances_of(row):
    """How far each token's information is from the expected one, as torch has it, and in float64."""
    ours = np.log(softmax(row)).astype(np.float32)
    return torch_distances(row), np.abs(-ours - np.float32(-np.sum(softmax(row) * np.log(softmax(row)))))


def typical_row_of(seed):
    """A row, and the sums of its probabilities, typical tokens first: None where torch's and ours are not the same."""
    row = np.random.default_rng(seed).integers(-8, 8, 8).astype(np.float32) / 4
    theirs, ours = distances_of(row)
    order = np.argsort(ours, kind="stable")
    their_sums = torch_sums(row, order, is_sorted_first=True)
    sums = np.cumsum(softmax(row).astype(np.float32)[order], dtype=np.float64).astype(np.float32)
    ranks, our_ranks = (np.unique(distances, return_inverse=True)[1] for distances in (theirs, ours))
    return (row, sums) if np.array_equal(ranks, our_ranks) and np.array_equal(their_sums, sums) else None


def around(limit):
    """The limit, and the next number on either side of it."""
    return [float(np.nextafter(np.float32(limit), np.float32(side))) for side in (0, limit, 1)]


def compared(backend, cases):
    """Ours beside Hugging Face's at each limit; many must change something, or no comparison is seen."""
    changes = 0
    for row, name, limits in cases:
        kept = [kept_by(backend, row, **{name: limit}) for limit in limits]
        assert kept == kept_by_huggingface(name, row, limits)
        changes += kept[0] != kept[-1]
    assert changes > 10


def test_a_probability_at_epsilon_stays():
    rows = [row_of(seed) for seed in SEEDS]
    compared(reference, [(row, "epsilon_cutoff", around(p)) for row in rows for p in probabilities_of(row)])


def test_a_probability_at_eta_stays():
    """Where the distribution is not flat, eta itself is the limit."""
    cases = []
    for row in [row_of(seed, spread=5.0) for seed in SEEDS]:
        probabilities = softmax(row)
        flatness = np.exp(np.sum(probabilities * np.log(probabilities)))
        small = [p for p in probabilities_of(row) if p > 1e-9 and np.sqrt(p) < 0.99 * flatness]
        cases += [(row, "eta_cutoff", around(p)) for p in small]
    compared(reference, cases)


@BACKENDS
def test_a_probability_at_min_p_of_the_greatest_stays(backend):
    cases = []
    for row in [row_of(seed) for seed in range(40)]:
        alike_in_row = np.float32(probabilities_of(row))
        top = softmax(row).max().astype(np.float32)
        limits = alike_in_row / top
        if top in alike_in_row:
            exact = limits[(limits * top == alike_in_row) & (limits < 1)]
            cases += [(row, "min_p", around(limit)) for limit in exact]
    compared(backend, cases)
    for row in (np.zeros(8, np.float32), row_of(1)):  # nothing but what ties with the greatest
        assert kept_by(backend, row, min_p=1.0) == kept_by_huggingface("min_p", row, [1.0])[0]


def test_what_adds_up_to_typical_p_is_enough():
    """Rows alone on which all sums agree: torch's own softmax of the sorted row rounds otherwise in most."""
    rows = [typical_row_of(seed) for seed in range(150)]
    limits = [(row, around(limit)) for row, sums in filter(None, rows) for limit in sums[sums < 1 - 1e-6]]
    compared(reference, [(row, "typical_p", nearby) for row, nearby in limits])


def test_all_stay_where_the_sum_of_all_is_below_the_limit():
    """Probabilities that are rounded down add up to less than 1."""
    found = 0
    for count in range(20, 60):
        row = np.zeros(count, np.float32)
        row[-1] = -0.5
        total = np.float32(np.sum(softmax(row).astype(np.float32), dtype=np.float64))
        if total < 1:
            found += 1
            beside = np.append(
                row, np.float32(-40)
            )  # adds nothing to the sum, which is at the limit without it
            kept = kept_by(reference, beside, top_p=float(total), top_p_rule="fastertransformer")
            assert kept == list(range(count))
            assert len(kept_by(reference, row, typical_p=ALL_BUT_NOTHING)) == count
            for rule in ("openai", "fastertransformer"):
                assert len(kept_by(reference, row, top_p=ALL_BUT_NOTHING, top_p_rule=rule)) == count
    assert found > 2
