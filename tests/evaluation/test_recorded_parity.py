"""Parity with transformers on checkpoints that need no torch to be written, live or as recorded."""

import numpy as np
import pytest

from support.engines import log_softmax
from support.golden_models import GOLDEN_MODELS, SMALL, golden_ids, write_golden
from support.oracles import TOLERANCE, beam_groups_of, beams_of, greedy_of, logits_of, top_logprobs_of
from support.tables import rows
from tinygpt import LLM, SamplingParams
from tinygpt.weights.config import ACTIVATIONS

PROMPT, NEW = 6, 30
TEXTS = (
    "Once upon a time, in a dark forest, there lived",
    "The king said: \u201cNo!\u201d",
    "caf\u00e9 \U0001f600",
)


@pytest.fixture(params=["cpu", "reference"])
def llm_of(request, tmp_path):
    opened = []

    def open_golden(name: str) -> LLM:
        opened.append(LLM(str(write_golden(tmp_path / name, name)), device=request.param))
        return opened[-1]

    yield open_golden
    for llm in opened:
        llm.close()


def test_models_cover_every_activation_but_for_other_names_of_the_same():
    used = {ACTIVATIONS[fields.get("activation_function", "gelu_new")] for fields in GOLDEN_MODELS.values()}
    assert used == set(ACTIVATIONS.values())


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_logits(llm_of, name):
    ids = golden_ids(SMALL["n_positions"])
    expected = logits_of(name, ids)  # (T, V)
    assert expected.std() > 1
    np.testing.assert_allclose(llm_of(name).logits(ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_greedy_tokens(llm_of, name):
    prompt = golden_ids(PROMPT, name)
    output = llm_of(name).generate([prompt], SamplingParams(max_tokens=NEW))[0].outputs[0]
    assert output.token_ids == greedy_of(name, prompt, NEW).tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_demo(text):
    with LLM("demo") as llm:
        prompt = llm.tokenizer.encode(text)
        output = llm.generate(text, SamplingParams(max_tokens=NEW, ignore_eos=True))[0].outputs[0]
        assert output.token_ids == greedy_of("demo", prompt, NEW).tolist()
        ids = prompt + output.token_ids
        logprobs = log_softmax(llm.logits(ids))  # (T, V)
    best, values = np.moveaxis(top_logprobs_of("demo", ids, 5), 1, 0)  # (T, 5) each
    np.testing.assert_allclose(
        np.take_along_axis(logprobs, best.astype(int), 1), values, rtol=0, atol=TOLERANCE
    )


# Of a search without groups, and what makes it one of groups.
RULES = rows("""
{"num_beams": 3, "max_new_tokens": 12, "eos_token_id": [5, 8], "length_penalty": 1.0, "early_stopping": false}
  | {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7}
{"num_beams": 4, "max_new_tokens": 9, "eos_token_id": [3], "length_penalty": -1.0, "early_stopping": true}
  | {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.5}
{"num_beams": 2, "max_new_tokens": 15, "eos_token_id": [0], "length_penalty": 2.0, "early_stopping": "never"}
  | {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 0.3}
""")


@pytest.mark.parametrize("name", ["plain", "relu", "untied", "gelu-fast"])
@pytest.mark.parametrize(("rules", "groups"), RULES)
@pytest.mark.parametrize("is_grouped", [False, True], ids=["one-group", "groups"])
def test_beams(llm_of, name, rules, groups, is_grouped):
    rules = rules | groups if is_grouped else rules
    prompt = golden_ids(PROMPT, f"{name} beams")
    expected = (beam_groups_of if is_grouped else beams_of)(name, prompt, rules)
    names = {"max_new_tokens": "max_tokens"}
    fields = {names.get(field, field): value for field, value in rules.items()}
    outputs = llm_of(name).generate([prompt], SamplingParams(n=rules["num_beams"], **fields))[0].outputs
    new = rules["max_new_tokens"]
    eos = rules["eos_token_id"]
    ours = [output.token_ids for output in outputs]
    if is_grouped:  # whichever EOS ended a sequence, the older scorer writes the first
        ours = [[eos[0] if token_id in eos else token_id for token_id in row] for row in ours]
    assert [row + eos[:1] * (new - len(row)) for row in ours] == expected[:, 1:].astype(int).tolist()
    assert [output.score for output in outputs] == pytest.approx(expected[:, 0].tolist(), abs=TOLERANCE)


# A simulated GPU is slow: of each kind of field one model, of a single layer and narrow where that is not the point.
SIMULATED = """
    plain head-size-1 head-size-7 head-size-64 odd-width inner-narrow gelu quick-gelu relu silu tanh scores-unscaled
    scores-by-layer epsilon-large
"""
NARROW = {"n_layer": 1, "n_embd": 12}
WIDE = ("head-size-1", "head-size-7", "head-size-64", "odd-width")


@pytest.mark.toolchain
@pytest.mark.parametrize(
    "name", ["untied", *(pytest.param(name, marks=pytest.mark.slow) for name in SIMULATED.split())]
)
def test_logits_and_greedy_tokens_on_a_simulated_gpu(name, device, tmp_path):
    prompt = golden_ids(5)
    fields = (
        {"n_layer": 1} if name in WIDE else NARROW | {"n_layer": 2} if name == "scores-by-layer" else NARROW
    )
    folder = write_golden(tmp_path, name, **fields)
    with LLM(str(folder), device="cuda", max_num_seqs=1, max_num_batched_tokens=8) as llm:
        expected = logits_of(name, prompt, **fields)  # (T, V)
        np.testing.assert_allclose(llm.logits(prompt), expected, rtol=0, atol=TOLERANCE)
        output = llm.generate([prompt], SamplingParams(max_tokens=2))[0].outputs[0]
        assert output.token_ids == greedy_of(name, prompt, 2, **fields).tolist()
