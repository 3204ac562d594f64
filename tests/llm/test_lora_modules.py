"""LLM(lora_modules=...): requests that choose an adapter, among others in one batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.engines import sample_of
from support.examples import daily
from support.golden_models import golden_ids, write_lora, write_model
from tinygpt import LLM, SamplingParams
from tinygpt.errors import CheckpointError, RequestError

FIELDS = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 90}
TARGETS = {"all": (3, ["c_attn", "c_proj", "c_fc"]), "few": (5, ["c_attn"]), "mlp": (1, ["c_fc"])}
PROMPT = golden_ids(30, vocab_size=90)
TOLERANCE = 1e-4  # of logits, compared with merged weights
DEVICES = pytest.mark.parametrize("device", ["cpu", "reference"])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name, (rank, targets) in TARGETS.items():
        write_lora(folder / name, rank=rank, targets=targets, has_head=False, **FIELDS)
    return write_model(folder / "base", **FIELDS)


@pytest.fixture(scope="module")
def adapters(base) -> dict[str, Path]:
    return {name: base.parent / name for name in TARGETS}


def all_logprobs(llm, **fields):
    """(T - 1 + 8, V): of each token of the prompt and of eight new ones, and the new tokens."""
    (output,) = llm.generate([PROMPT], max_tokens=8, logprobs=-1, prompt_logprobs=-1, **fields)
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([[row[i] for i in range(90)] for row in rows]), output.outputs[0].token_ids


@pytest.mark.slow  # compiles a step of its own
def test_adapters_compute_in_float16_as_in_float32(base, adapters):
    """Weights of float16 take the same float32 activations, and adapters stay float32: the difference is rounding."""
    found = []
    for dtype in ("float32", "float16"):
        with LLM(base, dtype=dtype, lora_modules=adapters, max_num_seqs=1) as llm:
            found += [all_logprobs(llm, lora_request="all", ignore_eos=True)[0][: len(PROMPT) - 1]]
            bare = all_logprobs(llm, ignore_eos=True)[0][: len(PROMPT) - 1]
    difference = np.abs(found[1] - found[0]).max()
    assert 0 < difference < np.abs(bare - found[0]).max() / 20


@DEVICES
def test_an_adapter_is_its_merged_weights(base, adapters, device):
    one_slot = {"max_num_seqs": 1, "prefix_cache_seqs": 0}  # which all have in turn
    with (
        LLM(base, device=device) as plain,
        LLM(base, device=device, lora_modules=adapters, **one_slot) as llm,
    ):
        bare, _ = all_logprobs(plain)
        for name, folder in adapters.items():
            with LLM(base, device=device, lora=folder) as merged:
                logprobs, tokens = all_logprobs(merged)
            found = all_logprobs(llm, lora_request=name)
            np.testing.assert_allclose(found[0], logprobs, rtol=0, atol=TOLERANCE)
            assert found[1] == tokens
            assert np.abs(logprobs - bare).max() > 0.1
            np.testing.assert_array_equal(all_logprobs(llm)[0], bare)


# A captured step, which compiles, sets the stream aside.
@pytest.mark.parametrize("captured", daily([[], ["attn_out", "mlp_out"]], [[]]))
def test_a_batch_mixes_adapters_and_each_has_the_bits_that_it_has_alone(base, adapters, captured):
    names = [None, *adapters, None, "few", "all"]
    params = [
        SamplingParams(
            max_tokens=12, temperature=0.9 * (i % 2), seed=i, logprobs=3, lora_request=name, ignore_eos=True
        )
        for i, name in enumerate(names)
    ]
    params[4] = replace(params[4], capture=captured)
    prompts = [golden_ids(3 + 5 * i, vocab_size=90) for i in range(len(names))]
    options = {"lora_modules": adapters, "max_num_batched_tokens": 11, "max_num_seqs": 7}
    with LLM(base, **options) as llm:
        together = llm.generate(prompts, params)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        with LLM(base, lora_modules=adapters, threads=1 + i % 2) as llm:
            (alone,) = llm.generate([prompt], p)
        (ours,), (theirs,) = together[i].outputs, alone.outputs
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


def test_no_prefix_is_shared_between_adapters(base, adapters):
    with LLM(base, device="reference", lora_modules=adapters) as llm:
        for name in (None, "all", "few"):
            cached = [
                llm.generate([PROMPT], max_tokens=1, lora_request=name)[0].num_cached_tokens for _ in range(2)
            ]
            assert cached == [0, len(PROMPT) - 1], name
        params = [SamplingParams(max_tokens=1, lora_request=name) for name in ("mlp", "mlp", None)]
        assert [each.num_cached_tokens for each in llm.generate([PROMPT] * 3, params)] == [0] + [
            len(PROMPT) - 1
        ] * 2


def test_the_request_may_stand_next_to_params(base, adapters):
    with LLM(base, device="reference", lora_modules=adapters) as llm:
        params = SamplingParams(max_tokens=5)
        chosen = llm.generate([PROMPT], SamplingParams(max_tokens=5, lora_request="all"))[0].outputs
        assert [sample_of(llm, PROMPT, p, lora_request="all").token_ids for p in (params, [params])] == [
            chosen[0].token_ids
        ] * 2


def test_what_is_refused(base, adapters, tmp_path):
    for modules, known in ((adapters, "the names are 'all', 'few', 'mlp'"), (None, "none was loaded")):
        refused = pytest.raises(RequestError, match=f"lora_request is 'other' and {known}")
        with LLM(base, device="reference", lora_modules=modules) as llm, refused:
            llm.generate([PROMPT], lora_request="other")
    head = write_lora(tmp_path / "head", rank=2, targets=["c_attn"], has_head=True, **FIELDS)
    with pytest.raises(
        CheckpointError, match=r"changes lm_head.weight: in lora_modules, only .* Merge it: lora"
    ):
        LLM(base, device="reference", lora_modules={"head": head})
    with pytest.raises(
        RequestError, match=r"lora_modules needs float32 or float16 weights on device .cpu., not int8"
    ):
        LLM(base, dtype="int8", lora_modules=adapters)
    with pytest.raises(RequestError, match=r"lora_modules is .* must be a dict from names to folders"):
        LLM(base, device="reference", lora_modules=[adapters["all"]])
