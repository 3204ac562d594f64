"""From logits to tokens with every control at once: their order, neighbours, errors, and transformers' tokens."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import log_softmax, sample_of
from support.examples import examples
from support.golden_models import write_model
from support.oracles import generate, live_model
from support.recorded import recorded
from support.sampling import BACKENDS, V, any_sequence, halve, sequence_of
from support.tables import column, fields
from tinygpt import LLM, SamplingParams
from tinygpt.engine.sampler import Sampler
from tinygpt.kernels import cpu, reference


def logits_of(rows, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, V)) * 3).astype(np.float32)


def sample(backend, logits, sequences):
    return Sampler(backend).sample(logits.copy(), sequences)


def sample_one(backend, sequence, logits):
    (token,) = sample(backend, logits, [sequence])
    return token


def fresh(sequence):
    """As the sequence was before anything was chosen for it."""
    return dataclasses.replace(sequence, sampling_state=None)


ODD_NUMBERS = np.float32([-np.inf, -0.0, 0.0, 1e38, -1e38, 1e-45])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(any_sequence, min_size=1, max_size=6), st.integers(0, 99))
def test_backends_process_the_same_and_a_row_as_if_alone(sequences, seed):
    scores = logits_of(len(sequences), seed)
    scores[:, seed % 3 :: 5] = np.random.default_rng(seed).choice(ODD_NUMBERS, scores[:, seed % 3 :: 5].shape)
    together, by_reference = scores.copy(), scores.copy()
    errors = Sampler(cpu).process(together, sequences)
    assert Sampler(reference).process(by_reference, [*map(fresh, sequences)]) == errors
    np.testing.assert_array_equal(together, by_reference)
    for r, sequence in enumerate(sequences):
        alone = scores[r : r + 1].copy()
        assert Sampler(cpu).process(alone, [fresh(sequence)]) == errors[r : r + 1]
        np.testing.assert_array_equal(alone[0], together[r])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(any_sequence, min_size=1, max_size=6), st.integers(0, 99))
def test_backends_sample_the_same_and_a_row_as_if_alone(sequences, seed):
    logits = logits_of(len(sequences), seed)
    together = sample(cpu, logits, sequences)
    by_reference = sample(reference, logits, [*map(fresh, sequences)])
    for r, (sequence, ours, theirs) in enumerate(zip(sequences, together, by_reference, strict=True)):
        assert sample_one(cpu, fresh(sequence), logits[r : r + 1]) == ours
        assert (ours.token_id, ours.error) == (theirs.token_id, theirs.error)
        assert (ours.logprobs is None, ours.logprob is None) == (
            theirs.logprobs is None,
            theirs.logprob is None,
        )
        np.testing.assert_allclose(
            *(np.array([t.logprob], np.float64) for t in (ours, theirs)), rtol=1e-6, atol=1e-6
        )


RARE = column("""
{"typical_p": 0.3}
{"top_n_sigma": 0.5}
{"top_p": 0.4, "top_p_rule": "openai"}
{"eta_cutoff": 0.2}
{"epsilon_cutoff": 0.1}
{"xtc_probability": 1.0}
{"top_k": 9}
{}
""")


@BACKENDS
def test_each_row_is_drawn_by_its_own_filters(backend):
    logits = np.repeat(logits_of(1), 40, axis=0)
    sequences = [sequence_of(temperature=1.5, seed=i, **RARE[i % len(RARE)]) for i in range(40)]
    together = sample(backend, logits, sequences)
    alone = [sample_one(backend, fresh(sequence), logits[:1]) for sequence in sequences]
    assert together == alone
    plain = sample(backend, logits, [sequence_of(temperature=1.5, seed=i) for i in range(40)])
    assert sum(ours != theirs for ours, theirs in zip(together, plain, strict=True)) > 8


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_raw_and_processed(backend, temperature):
    logits = logits_of(1)
    fields = {"temperature": temperature, "top_k": 5, "repetition_penalty": 2.0, "suppress_tokens": [0, 1]}
    scores = logits[0].copy()
    scores[2] = scores[2] / 2 if scores[2] > 0 else scores[2] * 2
    scores[:2] = -np.inf
    if temperature:
        scores = np.where(scores >= np.sort(scores)[-5], scores / np.float32(temperature), -np.inf)
    for mode, expected in [("raw", log_softmax(logits[0])), ("processed", log_softmax(scores))]:
        token = sample_one(backend, sequence_of(logprobs=7, logprobs_mode=mode, **fields), logits)
        best = [i for i in np.argsort(-expected, kind="stable")[:7].tolist() if expected[i] > -np.inf]
        assert list(token.logprobs) == list(dict.fromkeys((*best, token.token_id)))
        np.testing.assert_allclose(list(token.logprobs.values()), expected[list(token.logprobs)], atol=1e-6)
        assert token.logprob == token.logprobs[token.token_id]


@BACKENDS
def test_users_functions_come_after_the_processors_and_before_temperature(backend):
    logits, seen = logits_of(1), []

    def look(prompt_token_ids, new_token_ids, scores):
        seen.append((prompt_token_ids, new_token_ids, scores.copy()))
        scores[:] = -np.inf
        scores[33] = 1.0
        return scores

    sequence = sequence_of(
        [-7, 0, 2], [5], suppress_tokens=[4], temperature=0.5, logits_processors=[look, look]
    )
    assert sample_one(backend, sequence, logits).token_id == 33
    expected = logits[0].copy()
    expected[4] = -np.inf
    assert [call[:2] for call in seen] == [([0, 2], [5])] * 2
    np.testing.assert_array_equal(seen[0][2], expected)
    assert (sequence.prompt_token_ids, sequence.new_token_ids) == ([-7, 0, 2], [5])


@BACKENDS
@pytest.mark.parametrize(
    ("rule", "probabilities"), [("hf", [0.6, 0.4]), ("openai", [1.0]), ("fastertransformer", [6 / 7, 1 / 7])]
)
def test_each_rule_treats_the_token_that_reaches_p_by_its_name(backend, rule, probabilities):
    logits = np.log(np.float32([[0.6, 0.4] + [1e-9] * (V - 2)]))
    fields = {
        "temperature": 1.0,
        "top_p": 0.7,
        "top_p_rule": rule,
        "logprobs": V,
        "logprobs_mode": "processed",
    }
    found = sample_one(backend, sequence_of(**fields), logits).logprobs
    assert np.exp([found[token_id] for token_id in sorted(found)]) == pytest.approx(probabilities, abs=1e-4)


def test_top_p_decays_and_is_reset():
    """max(p * decay, min) after each token, p itself after a token that resets it."""
    sequence = sequence_of(top_p=0.8, top_p_decay=0.5, top_p_min=0.15, top_p_reset_ids=[9], temperature=1.0)
    used = []
    for token_id in [1, 2, 3, 9, 4]:
        sample_one(cpu, sequence, logits_of(1))
        used.append(sequence.sampling_state.top_p)
        sequence.new_token_ids.append(token_id)
    sample_one(cpu, sequence, logits_of(1))
    assert [*used, sequence.sampling_state.top_p] == [0.8, 0.4, 0.2, 0.15, 0.8, 0.4]


def test_xtc_leaves_the_only_token_that_other_rules_allow():
    fields = {
        "xtc_probability": 1.0,
        "xtc_threshold": 0.0,
        "allowed_token_ids": [2],
        "logprobs": 0,
        "temperature": 1.0,
    }
    token = sample_one(cpu, sequence_of(**fields, logprobs_mode="processed"), logits_of(1))
    assert (token.token_id, token.logprob) == (2, 0.0)


def fail(prompt_token_ids, new_token_ids, scores):
    raise KeyError("lost")


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("fields", "damage", "error"),
    [
        ({"logits_processors": fail}, None, r"processor fail raised KeyError\('lost'\) at position 3"),
        (
            {"logits_processors": [fail, halve]},
            None,
            r"processor fail raised KeyError\('lost'\) at position 3",
        ),
        (
            {"logits_processors": lambda p, n, s: s[1:]},
            None,
            r"an array of shape \(39,\) at position 3: .* 40",
        ),
        ({"logits_processors": lambda p, n, s: s * np.nan}, None, r"returned NaN or \+inf at position 3"),
        ({"logits_processors": lambda p, n, s: s + np.inf}, None, r"returned NaN or \+inf at position 3"),
        ({"logits_processors": lambda p, n, s: "no"}, None, r"raised ValueError"),
        ({"logits_processors": lambda p, n, s: s - np.inf}, None, "leave no token to choose at position 3"),
        ({"allowed_token_ids": [5], "suppress_tokens": [5]}, None, "leave no token to choose at position 3"),
        ({}, np.nan, "logits at position 2 are not finite"),
        ({"suppress_tokens": [5]}, np.inf, "logits at position 2 are not finite"),
        ({"logits_processors": halve}, np.nan, "logits at position 2 are not finite"),
        ({"logits_processors": halve}, np.inf, "logits at position 2 are not finite"),
        ({}, -np.inf, "logits at position 2 are not finite"),
    ],
)
def test_an_error_is_of_one_row_alone(backend, fields, damage, error, temperature):
    logits = logits_of(3)
    if damage is not None:
        logits[1] = damage
    sequences = [
        sequence_of(temperature=temperature, logprobs=2, **(fields if r == 1 else {})) for r in range(3)
    ]
    tokens = sample(backend, logits, sequences)
    assert (tokens[0].error, tokens[2].error) == (None, None)
    assert re.search(error, tokens[1].error)
    assert tokens[1][:3] == (-1, None, None)
    for r in (0, 2):
        assert tokens[r].token_id == sample_one(backend, fresh(sequences[r]), logits[r : r + 1]).token_id >= 0


@BACKENDS
def test_a_plain_row_has_its_greatest_token_or_an_error_of_its_own(backend):
    logits = logits_of(3)
    logits[0, 0], logits[1] = 99.0, np.nan
    tokens = sample(backend, logits, [sequence_of() for _ in logits])
    assert [token.token_id for token in tokens] == [0, -1, logits[2].argmax()]
    assert [token.error for token in tokens] == [None, sequence_of().not_finite, None]


SIZES = {"vocab_size": V, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "eos_token_id": 7}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Its logits are far apart, so that float32 rounding decides nothing."""
    with LLM(write_model(tmp_path_factory.mktemp("model"), **SIZES), threads=1) as llm:
        yield llm


[CONTROLS] = fields("""
all: repetition_penalty=1.4, no_repeat_ngram_size=2, bad_words_ids=[[3], [1, 2], [20, 21], [7]], min_tokens=10,\
     suppress_tokens=[5, 6], logit_bias={9: 4.0, 30: -6.0}, allowed_token_ids=range(4, 37), eos_token_id=[7, 12, 25]
""").values()
# Those that have other names or forms in transformers.
OTHERS = {
    "min_tokens": {"min_new_tokens": 10},
    "logit_bias": {"sequence_bias": {(9,): 4.0, (30,): -6.0}},
    "allowed_token_ids": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(4, 37))},
}
COMBINATIONS = [(name,) for name in CONTROLS] + list(itertools.combinations(CONTROLS, 2)) + [tuple(CONTROLS)]


def ours_of(names):
    return {name: CONTROLS[name] for name in names}


def theirs_of(names):
    return {key: value for name in names for key, value in OTHERS.get(name, ours_of([name])).items()}


@recorded
def controlled_greedy_of(prompt: list[int], names: list[str]) -> np.ndarray:
    fields = {"eos_token_id": 7, "max_new_tokens": 24, "pad_token_id": 0, **theirs_of(names)}
    output = generate(live_model(**SIZES), prompt, **fields)
    return output.sequences[0, len(prompt) :].numpy().astype(np.int8)


def test_greedy_tokens_are_transformers(llm):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V, rng.integers(1, 20)).tolist() for _ in COMBINATIONS]
    params = [SamplingParams(max_tokens=24, **ours_of(names)) for names in COMBINATIONS]
    outputs = llm.generate(prompts, params)
    for names, prompt, output in zip(COMBINATIONS, prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == controlled_greedy_of(prompt, names).tolist(), names


@recorded
def processed_by_transformers(
    logits: np.ndarray, token_ids: list[int], num_prompt: int, fields: dict
) -> np.ndarray:
    """(T, V): log probabilities after the prompt, from the processors that `generate` would build."""
    import torch
    from transformers import GenerationConfig

    names = fields["names"]
    chosen = fields["warpers"]
    config = GenerationConfig(do_sample=True, **{"top_k": 0, "eos_token_id": 7, **theirs_of(names), **chosen})
    model = live_model(**SIZES)
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(config, input_ids_seq_length=num_prompt, logits_processor=[])
    rows = []
    for t in range(num_prompt, len(token_ids)):
        scores = processors(torch.tensor([token_ids[:t]]), torch.from_numpy(logits[t - 1][None].copy()))[0]
        rows.append(scores.double().log_softmax(-1).float().numpy())
    return np.stack(rows)


@pytest.mark.parametrize("seed", range(8))
def test_sampled_probabilities_are_transformers(llm, seed):
    rng = np.random.default_rng(seed)
    names = [name for name in CONTROLS if name != "allowed_token_ids" and rng.random() < 0.5]
    warpers = {"temperature": 1.7, "top_k": 30, "top_p": 0.9723, "min_p": 0.0123, "typical_p": 0.9123}
    warpers |= {"epsilon_cutoff": 0.0031, "eta_cutoff": 0.0203}
    chosen = {name: warpers[name] for name in warpers if rng.random() < 0.6} | {"temperature": 1.7}
    ours = SamplingParams(
        max_tokens=12, seed=seed, logprobs=V, logprobs_mode="processed", **ours_of(names), **chosen
    )
    prompt = rng.integers(0, V, 5).tolist()
    output = sample_of(llm, prompt, ours)
    ids = prompt + output.token_ids
    expected = processed_by_transformers(
        llm.logits(ids), ids, len(prompt), {"names": names, "warpers": chosen}
    )
    for reported, row in zip(output.logprobs, expected, strict=True):
        assert sorted(reported) == np.flatnonzero(row > -np.inf).tolist()
        np.testing.assert_allclose([reported[i] for i in sorted(reported)], row[sorted(reported)], atol=1e-5)
