"""OPT, BLOOM, MPT, GPT-1, XGLM and BioGPT beside transformers' own classes, live or as recorded."""

import json

import numpy as np
import pytest

from support.family_models import CHARACTERS, FAMILY_MODELS, T, V, write_characters, write_family
from support.golden_models import golden_ids
from support.oracles import TOLERANCE, family_greedy_of, family_logits_of
from support.processes import Result
from support.recorded import needs_transformers
from tinygpt import LLM, SamplingParams
from tinygpt.evaluation.tasks import perplexity

PROMPT, NEW = 6, 20
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), "reference"]  # kernels of each family compile for a minute


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits_and_greedy_tokens(name, device, tmp_path):
    ids, prompt = golden_ids(T, vocab_size=V), golden_ids(PROMPT, name, V)
    expected, tokens = family_logits_of(name, ids), family_greedy_of(name, prompt, NEW)
    assert expected.std() > 1
    with LLM(str(write_family(tmp_path, name)), device=device) as llm:
        np.testing.assert_allclose(llm.logits(ids), expected, rtol=0, atol=TOLERANCE)
        output = llm.generate([prompt], SamplingParams(max_tokens=NEW))[0].outputs[0]
    assert output.token_ids == tokens.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["opt", "bloom-6"])
def test_perplexity_is_that_of_their_logits(name, device, tmp_path):
    ids = golden_ids(T, vocab_size=V)
    logits = family_logits_of(name, ids)[:-1].astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.exp(-np.log(shares[np.arange(T - 1), ids[1:]]).mean())
    folder = write_characters(write_family(tmp_path, name))
    with LLM(str(folder), device=device) as llm:
        found = perplexity(llm, "".join(CHARACTERS[i] for i in ids))
    assert (found.num_tokens, found.token_perplexity) == (T, pytest.approx(expected, rel=2e-5))


@needs_transformers
@pytest.mark.parametrize("name", ["opt", "opt-350m", "bloom-6", "mpt-6", "gpt-1", "xglm", "biogpt"])
def test_the_command(name, tmp_path, capsys):
    flags = [str(write_family(tmp_path, name)), "--device", "reference", "--max-tokens", "4"]
    layers = [] if name == "opt-350m" else ["--layers"]
    result = Result(capsys, "parity", [*flags, *layers, "--json"])
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["passed"]
    if layers:
        assert max(layer["largest"] for layer in report["by_layer"]) < TOLERANCE


def test_layers_cannot_be_compared_where_they_have_several_widths(tmp_path, capsys):
    result = Result(capsys, "parity", [str(write_family(tmp_path, "opt-350m")), "--device", "reference", "--layers"])
    assert result.code == 2
    assert "needs hidden states of one width" in result.err
