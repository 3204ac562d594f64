"""A model with more rows than its tokenizer has tokens, whose rows of no token are the likeliest: none is drawn."""

import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.gate import noting
from support.paths import VOCAB_SIZE
from support.tiny_checkpoint import C, copy_tokenizer, write_config, write_with_demo_tokenizer
from tinygpt import LLM, SamplingParams
from tinygpt.engine.model_runner import MAX_STEPS
from tinygpt.engine.step_loop import StepTimer
from tinygpt.errors import FailedRequestError
from tinygpt.kernels.cpu import screen_pack

MORE = 8
NO_TOKEN = range(VOCAB_SIZE, VOCAB_SIZE + MORE)


def write_padded(folder, scale=10.0, more=MORE, zeroed=False):
    """Logits are the same at each position, greatest for the rows of no token, with about 8 times the scale."""
    file = write_with_demo_tokenizer(folder) / "model.safetensors"
    tensors = load_file(file)
    direction = np.ones(C, np.float32)
    tensors["transformer.ln_f.weight"] *= 0
    tensors["transformer.ln_f.bias"] = direction
    rows = np.outer(np.linspace(scale, scale if zeroed else 1.1 * scale, more), direction).astype(np.float32)
    table = tensors["transformer.wte.weight"] * (not zeroed)
    tensors["transformer.wte.weight"] = np.concatenate([table, rows])
    save_file(tensors, file)
    write_config(folder, vocab_size=VOCAB_SIZE + more, n_positions=40)
    return copy_tokenizer(folder)


@pytest.fixture(scope="module", params=["cpu", "reference"])
def padded(request, tmp_path_factory):
    with LLM(write_padded(tmp_path_factory.mktemp("padded")), device=request.param, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(autouse=True)
def of_several_steps(monkeypatch):
    monkeypatch.setattr(StepTimer, "num_steps", lambda timer, seconds: MAX_STEPS if seconds else 1)


WAYS = [
    {},
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"num_beams": 2},
    {"temperature": 1.0, "seed": 3, "top_k": 3, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_no_such_row_is_drawn(padded, fields):
    for output in padded.generate([[1, NO_TOKEN[0]], [2]], SamplingParams(max_tokens=8, **fields)):
        for sample in output.outputs:
            assert len(sample.token_ids) == 8
            assert max(sample.token_ids) < VOCAB_SIZE


NAMED = [
    {"logit_bias": {NO_TOKEN[2]: 0.0}},
    {"allowed_token_ids": [5, NO_TOKEN[2]]},
    {"stop_token_ids": [NO_TOKEN[2]]},
    {"eos_token_id": NO_TOKEN[2]},
]


@pytest.mark.parametrize("fields", NAMED, ids=str)
def test_one_that_is_named_is_drawn(padded, fields):
    (output,) = padded.generate([[1]], SamplingParams(max_tokens=1, **fields))
    assert output.outputs[0].token_ids == [NO_TOKEN[2]]


def test_log_probabilities_are_of_all_rows(padded):
    (output,) = padded.generate([[1]], SamplingParams(max_tokens=1, logprobs=1))
    (token_id,) = output.outputs[0].token_ids
    (best,) = output.outputs[0].logprobs[0].keys() - {token_id}
    assert best == NO_TOKEN[-1]


WARPED = [{}, {"top_p": 0.7}, {"top_k": 20}, {"min_p": 0.5}, {"typical_p": 0.8}]


@pytest.mark.parametrize("fields", WARPED, ids=str)
def test_draws_are_those_of_a_model_without_such_rows(tmp_path, fields):
    """Alone and together, whatever the filter."""
    params = SamplingParams(max_tokens=30, temperature=1.0, n=4, ignore_eos=True, seed=5, **fields)
    drawn = {}
    for more in (MORE, 0):
        with LLM(write_padded(tmp_path / str(more), 0.8, more), max_num_seqs=8) as llm:
            drawn[more] = [one.outputs for one in llm.generate([[1], [2, 3]], params)]
            assert [llm.generate([ids], params)[0].outputs for ids in ([1], [2, 3])] == drawn[more]
    assert [[text.token_ids for text in one] for one in drawn[MORE]] == [
        [text.token_ids for text in one] for one in drawn[0]
    ]


def test_greedy_tokens_are_those_of_a_model_without_such_rows(tmp_path, monkeypatch):
    """Later prompts, too: their heads are screened."""
    monkeypatch.setattr(screen_pack, "LEAST_SIZE", 0)
    tokens = {}
    for more in (MORE, 0):
        with LLM(write_padded(tmp_path / str(more), more=more), max_num_seqs=4) as llm:
            asked = [llm.generate([[i]], SamplingParams(max_tokens=2, ignore_eos=True)) for i in range(6)]
            tokens[more] = [output.outputs[0].token_ids for (output,) in asked]
    assert tokens[MORE] == tokens[0]


def test_tokens_come_as_often_as_without_such_rows(tmp_path):
    """All tokens are alike, and rows of no token have half of the probability."""
    scale = np.log(VOCAB_SIZE / MORE) / C
    with LLM(write_padded(tmp_path, scale, zeroed=True), max_num_seqs=64) as llm:
        params = [SamplingParams(max_tokens=1, temperature=1.0, seed=i, ignore_eos=True) for i in range(1000)]
        ids = np.array([output.outputs[0].token_ids[0] for output in llm.generate([[1]] * 1000, params)])
    for share in (0.25, 0.5, 0.75):
        assert abs((ids < share * VOCAB_SIZE).mean() - share) < 0.05  # 3 standard deviations


def test_greedy_steps_are_several_in_a_call_until_such_a_row_is_the_greatest(tmp_path, monkeypatch):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(write_padded(tmp_path, -1.0), max_num_seqs=4) as llm:
        calls = noting(monkeypatch, llm.engine.runner, "multi_step", lambda *on: on[-2])
        llm.generate([[1]], params)
    assert calls == [7]


def test_if_only_such_rows_are_left_an_error_says_so(padded):
    def only_such(prompt, new, scores):
        return np.where(np.arange(scores.size) < VOCAB_SIZE, -np.inf, scores)

    params = SamplingParams(max_tokens=1, temperature=1.0, logits_processors=[only_such])
    with pytest.raises(FailedRequestError, match=f"Ids from {VOCAB_SIZE} on are of no token"):
        padded.generate([[1]], params)


def test_it_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), LLM(write_padded(tmp_path / "model")) as llm:
        llm.generate([[1], [2]], SamplingParams(max_tokens=2))
    (line,) = [record.message for record in caplog.records if "rows of no token" in record.message]
    assert f"has {MORE} rows of no token, from id {VOCAB_SIZE} on" in line
