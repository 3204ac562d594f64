"""The CUDA backend on a real GPU, beside transformers and beside the CPU."""

import numpy as np
import pytest

from support.cuda_device import on_a_gpu
from support.demo import EOS
from support.paths import DEMO
from support.recorded import HAS_TRANSFORMERS, MISSING
from tinygpt import LLM, SamplingParams

if not HAS_TRANSFORMERS:
    pytest.skip(MISSING, allow_module_level=True)
else:
    from transformers import GPT2LMHeadModel

    from support.factory import Case, greedy, make_case, prompt_of
    from support.parity import NEW_TOKENS, PROMPT_TOKENS, assert_same_greedy, assert_same_logits, without_eos
    from support.recipes import RECIPES

STEPS = 200  # of a greedy run


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: recipe.name)
def case(request, tmp_path_factory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param.name))


@on_a_gpu
@pytest.mark.gpu
def test_logits_and_greedy_tokens(case):
    prompt, positions = prompt_of(case), case.model.config.n_positions
    count = min(NEW_TOKENS, positions - PROMPT_TOKENS)
    with LLM(str(case.folder), device="cuda") as llm, without_eos(case.model):
        assert_same_logits(llm, case.model, case.random_ids(positions))
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        assert_same_greedy(llm, greedy(case.model, prompt, count), prompt, params)


@on_a_gpu
@pytest.mark.gpu
def test_the_demo_in_float32():
    model = GPT2LMHeadModel.from_pretrained(DEMO).eval()
    with LLM("demo", device="cuda") as llm, LLM("demo") as on_cpu, without_eos(model):
        ids = llm.tokenizer.encode("Once upon a time there was a king who had three sons.")
        assert_same_logits(llm, model, ids)
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
        (ours,), (theirs,) = llm.generate([ids], params), on_cpu.generate([ids], params)
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_sequence_has_the_same_bits_alone_or_not_on_a_gpu(dtype):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(EOS, size=size).tolist() for size in (1, 3, 64, 65, 200, 31, 130, 7, 12)]
    params = SamplingParams(max_tokens=70, ignore_eos=True, temperature=1.0, seed=3)
    with LLM("demo", dtype=dtype, device="cuda", prefix_cache_seqs=0) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        logits = llm.logits(prompts[4])
    with LLM("demo", dtype=dtype, device="cuda", max_num_seqs=1, max_num_batched_tokens=50) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert (llm.logits(prompts[4]) == logits).all()
    assert together == alone


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.3), ("int8", 1.1)])
def test_smaller_weights_are_near_float32_on_a_gpu(dtype, limit):
    with LLM("demo", device="cuda") as llm, LLM("demo", dtype=dtype, device="cuda") as smaller:
        ids = np.random.default_rng(1).integers(EOS, size=100).tolist()
        assert np.abs(llm.logits(ids) - smaller.logits(ids)).max() < limit
