"""The CUDA backend on a real GPU, beside transformers."""

import pytest

from support.cuda_device import on_a_gpu
from support.paths import DEMO
from support.recorded import HAS_TRANSFORMERS, MISSING
from tinygpt import LLM, SamplingParams

if not HAS_TRANSFORMERS:
    pytest.skip(MISSING, allow_module_level=True)
else:
    import torch
    from transformers import GPT2LMHeadModel

    from support.parity import (
        NEW_TOKENS,
        PROMPT_TOKENS,
        RECIPES,
        Case,
        assert_same_greedy,
        assert_same_logits,
        greedy,
        make_case,
        prompt_of,
        without_eos,
    )

STEPS = 200  # of a greedy run


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe.name)
def case(request, tmp_path_factory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param.name))


@on_a_gpu
@pytest.mark.gpu
def test_logits_and_greedy_tokens(case):
    prompt = prompt_of(case)
    positions = case.model.config.n_positions
    count = min(NEW_TOKENS, positions - PROMPT_TOKENS)
    with LLM(str(case.folder), device="cuda") as llm, without_eos(case.model):
        assert_same_logits(llm, case.model, case.random_ids(positions))
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        assert_same_greedy(llm, greedy(case.model, prompt, count), prompt, params)


@on_a_gpu
@pytest.mark.gpu
def test_the_demo_in_float32():
    model = GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32).eval()
    with LLM("demo", device="cuda") as llm, LLM("demo") as on_cpu, without_eos(model):
        ids = llm.tokenizer.encode("Once upon a time there was a king who had three sons.")
        assert_same_logits(llm, model, ids)
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
        (ours,), (theirs,) = llm.generate([ids], params), on_cpu.generate([ids], params)
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
