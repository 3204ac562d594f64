"""Beam search: the sequences and scores of transformers, and slots of the cache that hold what their beams need."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples
from support.golden_models import golden_ids, write_model
from support.oracles import HAS_GROUPS, generate, live_model
from support.recorded import recorded
from tinygpt import LLM, SamplingParams
from tinygpt.engine.beam_search import Beam, BeamSearch, Candidates, plan_slots

TOLERANCE = 1e-4  # on scores
SIZES = {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 40, "n_positions": 32}
Scorer = Callable[[list[int]], np.ndarray]  # token ids -> (V,) log probabilities of the next


@dataclass(frozen=True)
class Rules:
    """The names and the order of what transformers was asked."""

    num_beams: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    beam_search_diversity_rate: float = 0.0

    def search(self, **options) -> BeamSearch:
        given = asdict(self)
        return BeamSearch(end_ids=given.pop("eos_token_ids"), params=SamplingParams(**given), **options)


def search(scorer: Scorer, prompt: list[int], rules: Rules, **options) -> BeamSearch:
    beams = rules.search(**options)
    while beams.beams:
        rows = [scorer(prompt + beam.token_ids) for beam in beams.beams]
        beams.advance([Candidates.of(row, beams.num_candidates) for row in rows])
    return beams


def scorer_of(llm: LLM) -> Scorer:
    def scorer(token_ids: list[int]) -> np.ndarray:
        logits = llm.logits(token_ids)[-1].astype(np.float64)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    return scorer


def table_scorer(seed: int, vocab_size: int = 12) -> Scorer:
    """A language model that looks at the last two tokens."""
    logits = np.random.default_rng(seed).normal(
        size=(vocab_size, vocab_size, vocab_size), scale=(1.0, 0.3)[seed % 2]
    )
    table = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    return lambda token_ids: table[token_ids[-2], token_ids[-1]]


def random_rules(seed: int, scorer: Scorer, prompt: list[int], is_grouped: bool = False) -> Rules:
    """With EOS ids that a search without them meets, some of them at its last step."""
    chance = random.Random(seed)
    num_beams, num_beam_groups = (
        chance.choice(((2, 2), (4, 2), (6, 2), (6, 3))) if is_grouped else (2 + seed % 4, 1)
    )
    rules = Rules(
        num_beams=num_beams,
        max_tokens=chance.choice((1, 2, 5, 20, 20)),
        length_penalty=chance.choice((1.0, 0.0, -1.0, -1.0, 2.0)),
        early_stopping=(True, False, "never")[seed % 3],
        num_beam_groups=num_beam_groups,
        diversity_penalty=chance.choice((0.3, 1.0, 5.0)) if is_grouped else 0.0,
    )
    met = [h.token_ids[chance.choice((0, -1, -1)) :] for h in search(scorer, prompt, rules).best(6)]
    met = [token_id for token_ids in met for token_id in token_ids]
    eos_token_ids = tuple(dict.fromkeys(chance.sample(met, min(len(met), seed % 4))))
    return replace(rules, eos_token_ids=eos_token_ids)


def search_of_transformers(seed: int, prompt: list[int], rules: dict[str, Any]) -> np.ndarray:
    """(num_beams, 1 + max_tokens): a score and the new ids, and -1 behind them."""
    names = {"max_tokens": "max_new_tokens", "eos_token_ids": "eos_token_id"}
    options = {names.get(name, name): value for name, value in rules.items()}
    eos = options["eos_token_id"]
    if rules["num_beam_groups"] == 1:  # newer ones refuse the very names
        del options["num_beam_groups"], options["diversity_penalty"]
    options |= {
        "eos_token_id": eos or None,
        "pad_token_id": ([*eos, 0] if "num_beam_groups" in options else [0])[0],
    }
    options["num_return_sequences"] = rules["num_beams"]
    output = generate(live_model(str(seed), **SIZES), prompt, **options)
    table = np.full((rules["num_beams"], 1 + rules["max_tokens"]), -1.0)
    for row, score, token_ids in zip(table, output.sequences_scores, output.sequences.tolist(), strict=True):
        new = until_eos(token_ids[len(prompt) :], eos)
        row[: 1 + len(new)] = [score, *new]
    return table


@recorded
def beams_of_transformers(seed: int, prompt: list[int], rules: dict[str, Any]) -> np.ndarray:
    return search_of_transformers(seed, prompt, rules)


@recorded(is_live=HAS_GROUPS)
def groups_of_transformers(seed: int, prompt: list[int], rules: dict[str, Any]) -> np.ndarray:
    return search_of_transformers(seed, prompt, rules)


def until_eos(token_ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = [i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def assert_same(found: list[Beam], expected: list[tuple[list[int], float]]) -> None:
    assert [beam.token_ids for beam in found] == [token_ids for token_ids, _ in expected]
    scores = [score for _, score in expected]
    assert [beam.score for beam in found] == pytest.approx(scores, abs=TOLERANCE, rel=1e-6)


def assert_same_as_transformers(folder: Path, seed: int, is_grouped: bool) -> None:
    prompt = golden_ids(5, f"{seed} prompt", SIZES["vocab_size"])
    with LLM(write_model(folder, str(seed), **SIZES), device="reference") as llm:
        scorer = scorer_of(llm)
        rules = random_rules(seed, scorer, prompt, is_grouped)
        found = search(scorer, prompt, rules).best(rules.num_beams)
    options = {name: value for name, value in asdict(rules).items() if name != "beam_search_diversity_rate"}
    table = (groups_of_transformers if is_grouped else beams_of_transformers)(seed, prompt, options)
    if is_grouped:  # whichever EOS ended a sequence, its scorer writes the first
        found = [replace(beam, token_ids=with_first_eos(beam, rules)) for beam in found]
    assert_same(found, [([int(i) for i in row if i >= 0], score) for score, *row in table])


def with_first_eos(beam: Beam, rules: Rules) -> list[int]:
    token_ids = beam.token_ids
    return [*token_ids[:-1], rules.eos_token_ids[0]] if token_ids[-1] in rules.eos_token_ids else token_ids


@pytest.mark.parametrize(
    "seed", [*range(24), 39, 150]
)  # in the last two, a search is full at its very last step
def test_same_sequences_and_scores_as_transformers(tmp_path, seed):
    assert_same_as_transformers(tmp_path, seed, is_grouped=False)


@pytest.mark.parametrize("seed", range(24))
def test_same_groups_as_transformers(tmp_path, seed):
    assert_same_as_transformers(tmp_path, seed, is_grouped=True)


def test_the_first_n_of_more_are_returned():
    rules = Rules(num_beams=4, max_tokens=6)
    beams = search(table_scorer(0), [1, 2], rules)
    assert beams.best(2) == beams.best(4)[:2]
    assert [len(h.token_ids) for h in beams.best(4)] == [6] * 4


@pytest.mark.parametrize("rate", [-0.7, 0.4, 3.0])
def test_fastertransformers_diversity_rate(rate):
    """batch_topk_kernel: elem += diversity_rate * (elem_id % K) over 2 K candidates of each beam; totals stay y's."""
    K, scorer = 3, table_scorer(0)
    rules = Rules(num_beams=K, max_tokens=6, length_penalty=0.0, beam_search_diversity_rate=rate)
    beams = [([], 0.0)]
    for _ in range(6):
        y = []
        for token_ids, total in beams:
            scores = scorer([1, 2, *token_ids])
            y += [
                ([*token_ids, i], total + scores[i])
                for i in np.argsort(-scores, kind="stable")[: 2 * K].tolist()
            ]
        order = sorted(range(len(y)), key=lambda elem: -(y[elem][1] + rate * (elem % K)))
        beams = [y[elem] for elem in order[:K]]
    found = search(scorer, [1, 2], rules).best(K)
    assert_same(found, sorted(beams, key=lambda beam: -beam[1]))
    plain = search(scorer, [1, 2], replace(rules, beam_search_diversity_rate=0.0)).best(K)
    assert [h.token_ids for h in found] != [h.token_ids for h in plain]


class OldScorer:
    """One group of transformers' search with groups, written down as its BeamSearchScorer has it."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.size = rules.num_beams // rules.num_beam_groups
        self.beams = [([], 0.0)] + [([], -1e9)] * (self.size - 1)
        self.ended = []
        self.is_done = False

    def add(self, token_ids, total):
        self.ended.append((token_ids, total / len(token_ids) ** self.rules.length_penalty))
        self.ended.sort(key=lambda item: -item[1])
        del self.ended[self.size :]

    def step(self, scorer, prompt, chosen):
        """chosen: the tokens of the groups before, this step. Returns this group's."""
        if self.is_done:
            return [self.rules.eos_token_ids[0]] * self.size
        totals = []
        for token_ids, total in self.beams:
            scores = scorer(prompt + token_ids).astype(np.float64)
            scores = scores - self.rules.diversity_penalty * np.bincount(chosen, minlength=len(scores))
            totals += [(total + score, [*token_ids, i]) for i, score in enumerate(scores)]
        best = sorted(totals, key=lambda item: -item[0])[
            : max(2, 1 + len(self.rules.eos_token_ids)) * self.size
        ]
        self.beams = []
        for rank, (total, token_ids) in enumerate(best):
            if token_ids[-1] not in self.rules.eos_token_ids:
                self.beams.append((token_ids, total))
            elif rank < self.size:
                self.add(token_ids, total)
            if len(self.beams) == self.size:
                break
        self.is_done = len(self.ended) == self.size and self.bound(best[0]) <= self.ended[-1][1]
        return [token_ids[-1] for token_ids, _ in self.beams]

    def bound(self, best):
        if self.rules.early_stopping is True:
            return -np.inf
        length = len(best[1])
        if self.rules.early_stopping == "never" and self.rules.length_penalty > 0:
            length = self.rules.max_tokens
        return best[0] / length**self.rules.length_penalty


def old_group_search(scorer: Scorer, prompt: list[int], rules: Rules) -> list[tuple[list[int], float]]:
    groups = [OldScorer(rules) for _ in range(rules.num_beam_groups)]
    for _ in range(rules.max_tokens):
        chosen: list[int] = []
        for group in groups:
            chosen += group.step(scorer, prompt, np.array(chosen, int))
        if all(group.is_done for group in groups):
            break
    for group in groups:
        if not group.is_done:
            for token_ids, total in group.beams:
                group.add(token_ids, total)
    return sorted((item for group in groups for item in group.ended), key=lambda item: -item[1])


def test_groups_are_those_of_the_older_scorer():
    for seed in range(examples(300)):
        scorer = table_scorer(seed, 30)
        rules = random_rules(seed, scorer, [3, 4], is_grouped=True)
        found = search(scorer, [3, 4], rules).best(rules.num_beams)
        assert_same(found, old_group_search(scorer, [3, 4], rules))


def test_a_stop_string_ends_a_beam_as_eos_does():
    scorer = table_scorer(5)
    rules = Rules(num_beams=4, max_tokens=10, eos_token_ids=(7,), length_penalty=0.0)
    as_eos = search(scorer, [1, 2], rules).best(4)
    rules = Rules(num_beams=4, max_tokens=10, length_penalty=0.0)
    as_stop = search(scorer, [1, 2], rules, is_stopped=lambda token_ids: token_ids[-1] == 7).best(4)
    assert as_stop == as_eos
    assert 7 in [h.token_ids[-1] for h in as_eos]


def test_fewer_beams_where_fewer_tokens_are_possible():
    only = np.full(12, -np.inf, np.float32)
    only[3] = 0
    found = search(lambda token_ids: only, [1, 2], Rules(num_beams=4, max_tokens=3)).best(4)
    assert [h.token_ids for h in found] == [[3, 3, 3]]


def test_ties_go_to_the_lowest_beam_and_token():
    equal = np.full(12, -2.5, np.float32)
    beams = Rules(num_beams=3, max_tokens=9).search()
    beams.advance([Candidates.of(equal, 6)])
    assert [(b.sources[-1], b.token_ids) for b in beams.beams] == [(0, [0]), (0, [1]), (0, [2])]
    beams.advance([Candidates.of(equal, 6)] * 3)
    assert [(b.sources[-1], b.token_ids) for b in beams.beams] == [(0, [0, 0]), (0, [0, 1]), (0, [0, 2])]


@given(
    st.lists(st.sampled_from([-np.inf, -3.0, -2.0, -2.0, -1.0]), min_size=1, max_size=30), st.integers(1, 40)
)
def test_candidates_are_a_stable_sort(scores, count):
    scores = np.array(scores, np.float32)
    order = [i for i in np.argsort(-scores, kind="stable") if scores[i] > -np.inf][:count]
    found = Candidates.of(scores, count)
    assert found.token_ids.tolist() == order
    assert found.scores.tolist() == scores[order].tolist()


@given(st.data())
def test_rows_hold_what_their_beams_continue(data):
    count = data.draw(st.integers(1, 6))
    length = data.draw(st.integers(0, 5))
    held = {
        10 + i: data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)) for i in range(count)
    }
    held |= {20 + i: [] for i in range(data.draw(st.integers(0, 3)))}
    used = [slot for slot in held if slot < 20]
    sources = data.draw(st.lists(st.sampled_from(used), min_size=1, max_size=len(held)))
    slots, copies = plan_slots(sources, held)
    assert len(set(slots)) == len(slots)
    assert not {source for source, *_ in copies} & {target for _, target, *_ in copies}
    assert len(copies) == len(sources) - len(set(sources))  # as many beams as possible stay in place
    cache = {slot: list(ids) for slot, ids in held.items()}
    for source, target, start, stop in data.draw(st.permutations(copies)):
        cache[target][start:] = cache[source][start:stop]
        first = slice(start, start + 1)  # a position that is equal is not copied
        assert held[target][first] != held[source][first] or start == stop
    assert [cache[slot] for slot in slots] == [held[source] for source in sources]
