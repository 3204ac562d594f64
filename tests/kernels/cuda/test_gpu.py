"""The CUDA backend on a real GPU: the same bits in any batch, dtypes beside one another and beside the CPU."""

import numpy as np
import pytest

from support.cuda_device import on_a_gpu
from support.paths import EOS
from tinygpt import LLM, SamplingParams

BITS = [
    ("float32", "auto"),
    pytest.param("bfloat16", "auto", marks=pytest.mark.smoke),
    ("int8", "auto"),
    ("bfloat16", "int8"),
]


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.smoke
def test_float32_says_on_a_gpu_what_the_cpu_says():
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    ids = np.random.default_rng(2).integers(EOS, size=70).tolist()
    with LLM("demo", device="cuda") as llm, LLM("demo") as on_cpu:
        np.testing.assert_allclose(llm.logits(ids), on_cpu.logits(ids), atol=1e-4, rtol=0)
        (ours,), (theirs,) = llm.generate([ids], params), on_cpu.generate([ids], params)
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "cache"), BITS)
def test_a_sequence_has_the_same_bits_alone_or_not_on_a_gpu(dtype, cache):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(EOS, size=size).tolist() for size in (1, 3, 64, 65, 200, 31, 130, 7, 12)]
    params = SamplingParams(max_tokens=70, ignore_eos=True, temperature=1.0, seed=3)
    choices = {"dtype": dtype, "kv_cache_dtype": cache, "device": "cuda"}
    with LLM("demo", **choices, prefix_cache_seqs=0) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        logits = llm.logits(prompts[4])
    with LLM("demo", **choices, max_num_seqs=1, max_num_batched_tokens=50) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert (llm.logits(prompts[4]) == logits).all()
    assert together == alone


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "limit"), [pytest.param("bfloat16", 0.3, marks=pytest.mark.smoke), ("int8", 1.1)]
)
def test_smaller_weights_are_near_float32_on_a_gpu(dtype, limit):
    with LLM("demo", device="cuda") as llm, LLM("demo", dtype=dtype, device="cuda") as smaller:
        ids = np.random.default_rng(1).integers(EOS, size=100).tolist()
        assert np.abs(llm.logits(ids) - smaller.logits(ids)).max() < limit
