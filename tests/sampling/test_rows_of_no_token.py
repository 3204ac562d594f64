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

MORE = 8
NO_TOKEN = range(VOCAB_SIZE, VOCAB_SIZE + MORE)


def write_padded(folder, scale=10.0):
    """Logits are the same at each position, greatest for the rows of no token, with about 8 times the scale."""
    file = write_with_demo_tokenizer(folder) / "model.safetensors"
    tensors = load_file(file)
    direction = np.ones(C, np.float32)
    tensors["transformer.ln_f.weight"] *= 0
    tensors["transformer.ln_f.bias"] = direction
    rows = np.outer(np.linspace(scale, 1.1 * scale, MORE), direction).astype(np.float32)
    tensors["transformer.wte.weight"] = np.concatenate([tensors["transformer.wte.weight"], rows])
    save_file(tensors, file)
    write_config(folder, vocab_size=VOCAB_SIZE + MORE, n_positions=40)
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


def test_draws_are_those_of_a_model_without_such_rows_until_one_is_drawn(tmp_path, monkeypatch):
    """Alone, together, in steps of one and of several."""
    fields = {"max_tokens": 30, "temperature": 1.0, "n": 4, "ignore_eos": True}
    with LLM(write_padded(tmp_path / "model", 0.8), max_num_seqs=8) as llm:
        calls = noting(monkeypatch, llm.engine.runner, "multi_step", lambda *on: on[-2])
        several = [
            [o.token_ids for o in one.outputs] for one in llm.generate([[1], [2, 3]], fields_of(fields))
        ]
        monkeypatch.setattr(llm.engine.runner, "choose_num_steps", lambda *of: 1)
        single = [llm.generate([ids], fields_of(fields))[0].outputs for ids in ([1], [2, 3])]
        named = llm.generate([[1]], fields_of(fields, logit_bias=dict.fromkeys(NO_TOKEN, 0.0)))[0].outputs
    assert several == [[o.token_ids for o in outputs] for outputs in single]
    assert max(max(ids) for one in several for ids in one) < VOCAB_SIZE
    assert calls
    drawn = [[token_id in NO_TOKEN for token_id in text.token_ids] for text in named]
    assert any(map(any, drawn))
    for text, other, is_no_token in zip(several[0], named, drawn, strict=True):
        first = [*is_no_token, True].index(True)
        assert text[:first] == other.token_ids[:first]


def fields_of(fields, **more):
    return SamplingParams(**fields, **more, seed=5)


def test_it_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), LLM(write_padded(tmp_path / "model")) as llm:
        llm.generate([[1], [2]], SamplingParams(max_tokens=2))
    (line,) = [record.message for record in caplog.records if "rows of no token" in record.message]
    assert f"has {MORE} rows of no token, from id {VOCAB_SIZE} on" in line
