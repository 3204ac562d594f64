"""Other models than GPT-2 beside transformers' own classes, and GPT with experts, live or as recorded."""

import json

import numpy as np
import pytest

from support import moe_models
from support.family_models import CHARACTERS, FAMILY_MODELS, T, V, write_characters, write_family
from support.golden_models import golden_ids
from support.moe_models import E, moe_arrays, write_moe
from support.oracles import TOLERANCE, family_greedy_of, family_logits_of, moe_logits_of
from support.processes import Result
from support.recorded import needs_transformers
from tinygpt import LLM, SamplingParams
from tinygpt.evaluation.tasks import perplexity

PROMPT, NEW = 6, 20


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), "reference"])
def device(request) -> str:
    """Kernels of each family compile for a minute."""
    return request.param


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits_and_greedy_tokens(name, device, tmp_path):
    ids = golden_ids(T, vocab_size=V)
    prompt = golden_ids(PROMPT, name, V)
    expected = family_logits_of(name, ids)
    tokens = family_greedy_of(name, prompt, NEW)
    assert expected.std() > 1
    with LLM(str(write_family(tmp_path, name)), device=device) as llm:
        np.testing.assert_allclose(llm.logits(ids), expected, rtol=0, atol=TOLERANCE)
        output = llm.generate([prompt], SamplingParams(max_tokens=NEW))[0].outputs[0]
    assert output.token_ids == tokens.tolist()


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
    result = Result(
        capsys, "parity", [str(write_family(tmp_path, "opt-350m")), "--device", "reference", "--layers"]
    )
    assert result.code == 2
    assert "needs hidden states of one width" in result.err


@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_logits_of_experts(per_token, device, tmp_path):
    ids = golden_ids(moe_models.T, vocab_size=moe_models.V)
    expected = moe_logits_of(per_token, ids)
    assert expected.std() > 1
    with LLM(str(write_moe(tmp_path, moe_arrays(), topk=per_token)), device=device) as llm:
        np.testing.assert_allclose(llm.logits(ids), expected, rtol=0, atol=TOLERANCE)


def first_alone(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model of the first expert alone: its probability is 1."""
    kept = {name: a for name, a in arrays.items() if ".experts." not in name or ".experts.0." in name}
    return {name: a[:1] if name.endswith("gate.weight") else a for name, a in kept.items()}


def logits_of(folder, arrays, device, **settings):
    with LLM(str(write_moe(folder, arrays, **settings)), device=device) as llm:
        return llm.logits(golden_ids(moe_models.T, vocab_size=moe_models.V))


def test_of_equal_probabilities_the_first_expert_is_chosen(device, tmp_path):
    """So all tokens go to one expert, and the others have none."""
    arrays = {
        name: np.zeros_like(a) if name.endswith("gate.weight") else a for name, a in moe_arrays().items()
    }
    first = {
        name: a / np.float32(E) if "experts.0.c_proj.weight" in name else a for name, a in arrays.items()
    }
    expected = logits_of(tmp_path / "alone", first_alone(first), device, topk=1)
    np.testing.assert_allclose(
        logits_of(tmp_path / "all", arrays, device, topk=1), expected, rtol=0, atol=1e-5
    )


def test_experts_that_are_the_same_are_one(device, tmp_path):
    arrays = moe_arrays()
    same = {
        name: arrays[f"{name.split('.experts.')[0]}.experts.0.{name.split('.', 5)[5]}"]
        if ".experts." in name
        else a
        for name, a in arrays.items()
    }
    expected = logits_of(tmp_path / "alone", first_alone(same), device, topk=1)
    for per_token in (2, E):
        found = logits_of(tmp_path / str(per_token), same, device, topk=per_token)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_text_does_not_depend_on_what_its_neighbours_chose(tmp_path):
    """On the CPU, to the last bit: no expert is ever full."""
    prompts = [golden_ids(n, f"prompt {n}", moe_models.V) for n in (1, 3, 7, 12, 5, 5, 9)]
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    with LLM(
        str(write_moe(tmp_path, moe_arrays(), topk=2)), max_num_seqs=8, max_num_batched_tokens=16
    ) as llm:
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            assert llm.generate([prompt], params)[0].outputs[0].logprobs == output.outputs[0].logprobs
            np.testing.assert_array_equal(llm.logits(prompt)[:3], llm.logits(prompt[:3])[:3])
