"""An int8 KV cache in all that the engine does with one: each request gets the bits that it gets alone.

What moves keys and values between slots has to move their scales, too. That of sessions is in text/test_session.py, of
ranks in ranks/test_bits.py.
"""

from dataclasses import replace

import numpy as np
import pytest

from support.engines import log_softmax, sizes
from support.golden_models import golden_ids, write_model, write_soft_prompt
from support.paths import EOS
from tinygpt import LLM, SamplingParams

INT8 = {"dtype": "int8", "kv_cache_dtype": "int8"}
BASE = np.random.default_rng(0).integers(EOS, size=90).tolist()  # over the border of a block of positions
PROMPTS = [BASE[:70], [5, 6, 7], [*BASE[:66], 3], [9], [*BASE[:40], 8, 9]]
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)
FIELDS = {"n_layer": 3, "n_head": 3, "n_embd": 48, "n_positions": 96, "vocab_size": 90}


@pytest.fixture(scope="module")
def alone(small_demo):
    with LLM(small_demo, **INT8, max_num_seqs=1, prefix_cache_seqs=0) as llm:
        yield llm


def answers(llm: LLM, prompts, params) -> list[list[tuple]]:
    return [told(output) for output in llm.generate(prompts, params)]


def told(output) -> list[tuple]:
    return [(o.token_ids, o.logprobs, o.cumulative_logprob, o.score) for o in output.outputs]


def one_by_one(llm: LLM, params) -> list[list[tuple]]:
    return [answers(llm, [prompt], params)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("limits", [(1, 1, 0), (3, 5, 1), (4, 64, 3)], ids=str)
def test_company_pieces_of_a_prompt_and_shared_beginnings_change_nothing(small_demo, alone, limits):
    expected = one_by_one(alone, GREEDY)
    with LLM(small_demo, **INT8, **sizes(*limits)) as llm:
        assert answers(llm, PROMPTS, GREEDY) == expected
        again = llm.generate(PROMPTS, GREEDY)
        assert [told(output) for output in again] == expected
        assert (sum(output.num_cached_tokens for output in again) > 0) == (limits[2] > 0)


def test_beams_change_nothing_and_have_the_scores_of_their_tokens(small_demo, alone):
    params = SamplingParams(max_tokens=8, num_beams=3, n=3, ignore_eos=True)
    with LLM(small_demo, **INT8, max_num_seqs=3, prefix_cache_seqs=0) as llm:
        expected = one_by_one(llm, params)
    with LLM(small_demo, **INT8, max_num_seqs=9, max_num_batched_tokens=20) as llm:
        assert answers(llm, PROMPTS, params) == expected
    for prompt, found in zip(PROMPTS, expected, strict=True):
        for token_ids, _, _, score in found:
            shares = log_softmax(alone.logits(prompt + token_ids))[len(prompt) - 1 : -1]  # (8, V)
            assert score == pytest.approx(shares[np.arange(8), token_ids].mean(), abs=1e-4)


def test_drafts_change_nothing(small_demo, alone):
    expected = one_by_one(alone, GREEDY)
    lookup = replace(GREEDY, prompt_lookup_num_tokens=4)
    with LLM(small_demo, **INT8, draft_model=small_demo, num_speculative_tokens=3, max_num_seqs=3) as llm:
        assert answers(llm, PROMPTS, lookup) == expected


def test_attention_maps_are_near_those_of_a_float_cache(small_demo, alone):
    with LLM(small_demo, dtype="int8", max_num_seqs=1) as llm:
        exact = llm.attentions(BASE[:70])
    maps = alone.attentions(BASE[:70])
    assert 0 < np.abs(maps - exact).max() < 0.05


def test_a_prefix_of_a_file_becomes_int8(tmp_path):
    """Its keys and values are float32 there: they are quantised as the kernel quantises those it computes."""
    base = str(write_model(tmp_path / "base", **FIELDS))
    soft = {"prefix": write_soft_prompt(tmp_path / "soft", "prefix", 7, **FIELDS)}

    def log_probabilities(cache: str, name: str | None) -> np.ndarray:
        """(19, V), of a prompt."""
        params = SamplingParams(max_tokens=1, soft_prompt=name, prompt_logprobs=90)
        with LLM(base, dtype="int8", kv_cache_dtype=cache, soft_prompts=soft) as llm:
            (output,) = llm.generate([golden_ids(20, vocab_size=90)], params)
        return np.array([[row[token_id] for token_id in range(90)] for row in output.prompt_logprobs[1:]])

    exact = log_probabilities("float32", "prefix")
    without = log_probabilities("float32", None)
    error = np.abs(log_probabilities("int8", "prefix") - exact).mean()
    assert 0 < error < np.abs(without - exact).mean() / 10
