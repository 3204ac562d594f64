"""What changes the scores: against transformers' classes and OpenAI's formula; the CPU's against the reference's."""

import numpy as np
import pytest

from support.recorded import HAS_TRANSFORMERS, recorded
from support.sampling import BACKENDS, EOS, sequence_of
from tinygpt.engine.sampler import Sampler
from tinygpt.kernels import cpu, reference

if HAS_TRANSFORMERS:
    import torch
    import transformers

V = 30


def random_row(seed):
    return (np.random.default_rng(seed).standard_normal(V) * 3).astype(np.float32)


def tied_row(seed):
    return np.random.default_rng(seed).integers(-2, 3, V).astype(np.float32)


def masked_row(seed):
    row = random_row(seed)
    row[np.random.default_rng(seed).random(V) < 0.6] = -np.inf
    return row


def one_survivor(seed):
    row = np.full(V, -np.inf, np.float32)
    row[seed % V] = -2.0
    return row


def signed_zeros(seed):
    return np.random.default_rng(seed).choice(np.float32([-0.0, 0.0, 1e38, -1e38, 1e-45]), V)


ROWS = [random_row, tied_row, masked_row, one_survivor, signed_zeros]


def process(backend, row, prompt, new, **fields):
    logits = row[None].copy()
    assert Sampler(backend).process(logits, [sequence_of(prompt, new, **fields)]) == [None]
    return logits[0]


@recorded
def processed(row, prompt, new, case):
    return through(row, prompt + new, *CASES[case][1](len(prompt)))


@recorded
def penalised(row, token_ids, repetition_penalty):
    return through(row, token_ids, transformers.RepetitionPenaltyLogitsProcessor(repetition_penalty))


@recorded
def without_words(row, token_ids, words):
    return through(row, token_ids, transformers.NoBadWordsLogitsProcessor(words, list(EOS)))


def through(row, token_ids, *processors):
    scores = torch.from_numpy(row.copy())[None]
    ids = torch.tensor([token_ids], dtype=torch.long)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].numpy()


def histories(seed):
    """A prompt and an output over few ids, so that much of it comes again; at first the output is empty."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 6, rng.integers(1, 12)).tolist()
    return prompt, rng.integers(0, 6, rng.integers(0, 8) if seed else 0).tolist()


def hf(name, *arguments):
    """Return a function of the prompt's length that makes Hugging Face's processors."""
    return lambda prompt: [getattr(transformers, f"{name}LogitsProcessor")(*arguments)]


# Fields of ours, and Hugging Face's processors that do the same.
WORDS = [[3], [1, 2], [0, 0, 4], [5, 5], [2, 5], [7]]
CASES = {
    "repetition_penalty": ({"repetition_penalty": 1.3}, hf("RepetitionPenalty", 1.3)),
    "repetition_reward": ({"repetition_penalty": 0.7}, hf("RepetitionPenalty", 0.7)),
    "bad_words_ids": ({"bad_words_ids": WORDS}, hf("NoBadWords", WORDS, list(EOS))),
    "suppress_tokens": ({"suppress_tokens": [0, 5, 5, 29]}, hf("SuppressTokens", [0, 5, 5, 29])),
    "allowed_token_ids": (
        {"allowed_token_ids": [2, 3, 3, 28]},
        hf("PrefixConstrained", lambda batch, ids: [2, 3, 28], 1),
    ),
    "logit_bias": (
        {"logit_bias": {4: 2.5, 0: -100.0, 29: 0.1}},
        hf("SequenceBias", {(4,): 2.5, (0,): -100.0, (29,): 0.1}),
    ),
}
for size in (1, 2, 3, 5, 40):
    CASES[f"no_repeat_ngram_size={size}"] = {"no_repeat_ngram_size": size}, hf("NoRepeatNGram", size)
for count in (1, 3, 9):
    CASES[f"min_tokens={count}"] = (
        {"min_tokens": count},
        lambda prompt, count=count: hf("MinNewTokensLength", prompt, count, list(EOS))(prompt),
    )
# All of them at once, in the order of transformers' generate.
ORDER = ["logit_bias", "repetition_penalty", "no_repeat_ngram_size=2", "bad_words_ids", "min_tokens=9"]
ORDER += ["allowed_token_ids", "suppress_tokens"]
CASES["all"] = (
    {name: value for case in ORDER for name, value in CASES[case][0].items()},
    lambda prompt: [processor for case in ORDER for processor in CASES[case][1](prompt)],
)


@BACKENDS
@pytest.mark.parametrize("make_row", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_each_equals_huggingface_to_the_bit(backend, case, make_row):
    fields, _ = CASES[case]
    for seed in range(12):
        row = make_row(seed)
        (prompt, new) = histories(seed)
        ours = process(backend, row, prompt, new, **fields)
        if np.isneginf(ours).all() and "allowed_token_ids" in fields:
            continue  # where no allowed token is left, Hugging Face allows them all again, and ours is an error
        theirs = processed(row, prompt, new, case)
        np.testing.assert_array_equal(ours, theirs)


@BACKENDS
@pytest.mark.parametrize("prompt", [[1], [2], [1, 2], [2, 1]], ids=str)
def test_a_history_that_is_all_of_a_words_beginning_forbids_its_end(backend, prompt):
    row = random_row(4)
    words = [[1, 2], [2, 1, 5], [1, 2, 6]]
    ours = process(backend, row, prompt, [], bad_words_ids=words)
    theirs = without_words(row, prompt, words)
    np.testing.assert_array_equal(ours, theirs)
    assert np.isneginf(ours).sum() == (prompt == [1]) + (len(prompt) > 1) + (prompt == [2, 1])


@BACKENDS
def test_presence_and_frequency_follow_openais_formula_over_the_output_alone(backend):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence; repetition comes before them."""
    row = random_row(0)
    prompt = [1, 1, 2]
    new = [3, 3, 3, 2]
    counts = np.zeros(V, np.float32)
    counts[2], counts[3] = 1, 3
    for frequency, presence in [(0.5, 0.25), (-2.0, 0.0), (0.0, 2.0)]:
        fields = {"frequency_penalty": frequency, "presence_penalty": presence}
        ours = process(backend, row, prompt, new, **fields)
        np.testing.assert_array_equal(
            ours, row - counts * np.float32(frequency) - (counts > 0) * np.float32(presence)
        )
        both = process(backend, row, prompt, new, repetition_penalty=2.0, **fields)
        first = penalised(row, prompt + new, 2.0)
        np.testing.assert_array_equal(
            both, first - counts * np.float32(frequency) - (counts > 0) * np.float32(presence)
        )


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_presence_by_fastertransformers_rule(backend, temperature):
    """batchApplyRepetitionPenalty, Additive: logit / T - penalty, once for each id of the prompt and the output."""
    row = random_row(0)
    T = np.float32(temperature or 1)
    fields = {
        "presence_penalty": 0.5,
        "presence_penalty_rule": "fastertransformer",
        "temperature": temperature,
    }
    ours = process(backend, row, [1, 1, 2], [3, 3, 2], **fields) / T
    expected = row / T
    for token_id in (1, 2, 3):
        expected[token_id] -= 0.5
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 2.0}, {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}]
)
def test_a_penalty_of_a_round_number_is_one(penalty):
    row = random_row(0)
    ours = process(cpu, row, [1, 2], [3, 3], **penalty)
    np.testing.assert_array_equal(ours, process(reference, row, [1, 2], [3, 3], **penalty))
    assert (ours != row).any()


@BACKENDS
def test_min_tokens_forbids_all_that_would_end_the_sample(backend):
    def forbidden(new, **fields):
        row = process(backend, random_row(1), [1], new, min_tokens=2, **fields)
        return np.flatnonzero(row == -np.inf).tolist()

    assert forbidden([5], stop_token_ids=[3, 7]) == [3, 7, 11]
    assert forbidden([5], stop_token_ids=[3], ignore_eos=True) == [3, 7, 11]
    assert forbidden([5, 5], stop_token_ids=[3]) == []


@BACKENDS
def test_rows_of_soft_prompts_are_no_tokens(backend):
    fields = {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[3, 4]],
    }
    row = random_row(2)
    with_rows = process(backend, row, [-5, -6, 1, 2, 3], [1, 3], **fields)
    without = process(backend, row, [1, 2, 3], [1, 3], **fields)
    np.testing.assert_array_equal(with_rows, without)
