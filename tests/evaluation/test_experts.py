"""GPT with experts beside transformers' GPT-2 with its MLPs replaced, live or as recorded."""

import numpy as np
import pytest

from support.golden_models import golden_ids
from support.moe_models import E, T, V, moe_arrays, write_moe
from support.oracles import TOLERANCE, moe_logits_of
from tinygpt import LLM, SamplingParams

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), "reference"]  # kernels of their own compile for a minute


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_logits(per_token, device, tmp_path):
    ids = golden_ids(T, vocab_size=V)
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
        return llm.logits(golden_ids(T, vocab_size=V))


def test_of_equal_probabilities_the_first_expert_is_chosen(device, tmp_path):
    """So all tokens go to one expert, and the others have none."""
    arrays = {name: np.zeros_like(a) if name.endswith("gate.weight") else a for name, a in moe_arrays().items()}
    first = {name: a / np.float32(E) if "experts.0.c_proj.weight" in name else a for name, a in arrays.items()}
    expected = logits_of(tmp_path / "alone", first_alone(first), device, topk=1)
    np.testing.assert_allclose(logits_of(tmp_path / "all", arrays, device, topk=1), expected, rtol=0, atol=1e-5)


def test_experts_that_are_the_same_are_one(device, tmp_path):
    arrays = moe_arrays()
    same = {
        name: arrays[f"{name.split('.experts.')[0]}.experts.0.{name.split('.', 5)[5]}"] if ".experts." in name else a
        for name, a in arrays.items()
    }
    expected = logits_of(tmp_path / "alone", first_alone(same), device, topk=1)
    for per_token in (2, E):
        found = logits_of(tmp_path / str(per_token), same, device, topk=per_token)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_text_does_not_depend_on_what_its_neighbours_chose(tmp_path):
    """On the CPU, to the last bit: no expert is ever full."""
    prompts = [golden_ids(n, f"prompt {n}", V) for n in (1, 3, 7, 12, 5, 5, 9)]
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    with LLM(str(write_moe(tmp_path, moe_arrays(), topk=2)), max_num_seqs=8, max_num_batched_tokens=16) as llm:
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            assert llm.generate([prompt], params)[0].outputs[0].logprobs == output.outputs[0].logprobs
            np.testing.assert_array_equal(llm.logits(prompt)[:3], llm.logits(prompt[:3])[:3])
