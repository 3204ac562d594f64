"""Log probabilities of prompts: the model's own, and no work unless asked for; neighbours: test_prefix_cache.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from support import tiny_checkpoint
from support.engines import batches_of
from support.paths import VOCAB_SIZE as V
from support.tables import fields
from tinygpt import LLM, SamplingParams
from tinygpt.engine.prompt_scorer import PromptScorer
from tinygpt.errors import TinyGPTError
from tinygpt.kernels import cpu, reference
from tinygpt.llm_args import LOGIT_ROWS

PROMPT = np.random.default_rng(0).integers(V, size=200).tolist()


def asked(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "seed": 0, "prompt_logprobs": 2, **fields})


@pytest.mark.parametrize("length", [2, 9, 64, 65, 66, 200])
@pytest.mark.parametrize("best", [0, 3, -1])
def test_they_are_those_of_the_logits(llm, length, best):
    prompt = PROMPT[:length]
    logits = llm.logits(prompt)
    (output,) = llm.generate([prompt], asked(prompt_logprobs=best))
    best = logits.shape[1] if best == -1 else best
    assert (len(output.prompt_logprobs), output.prompt_logprobs[0]) == (length, None)
    own = []
    for row, token_id, found in zip(logits, prompt[1:], output.prompt_logprobs[1:], strict=False):
        ids, values, value = reference.top_logprobs(row, token_id, best)
        assert list(found) == [*ids, *({token_id} - set(ids.tolist()))]  # the most probable first
        np.testing.assert_allclose(list(found.values())[:best], values, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[token_id], value, rtol=0, atol=1e-5)
        own.append(found[token_id])
    np.testing.assert_allclose(output.prompt_cumulative_logprob, sum(own), rtol=1e-12)


ELSE = fields("""
processed: logit_bias={5: 50.0}, temperature=1.0, logprobs_mode="processed"
samples: n=3, temperature=1.0
the best: n=1, best_of=3, temperature=1.0
beams: num_beams=3, n=2
drafts: prompt_lookup_num_tokens=4
""")


@pytest.mark.parametrize("fields", ELSE.values(), ids=ELSE)
def test_whatever_else_is_asked_for(llm, alone, fields):
    with_them = asked(**fields)
    without = asked(**{**fields, "prompt_logprobs": None})
    (expected,) = alone.generate([PROMPT], asked())
    (output,) = llm.generate([PROMPT], with_them)
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.outputs == llm.generate([PROMPT], without)[0].outputs


@pytest.mark.usefixtures("single_steps")
def test_logits_are_computed_only_where_they_are_wanted(monkeypatch, small_demo):
    with LLM(small_demo, max_num_seqs=8) as llm:
        batches = batches_of(llm, monkeypatch)
        llm.generate([PROMPT], asked(prompt_logprobs=None, max_tokens=1))
        assert [batch.logit_rows.size for batch in batches] == [1]
        (output,) = llm.generate([PROMPT], asked(max_tokens=1, n=3, temperature=1.0))
        assert (sum(batch.logit_rows.size for batch in batches[1:]), output.num_cached_tokens) == (200 + 2, 0)
        assert llm.generate([PROMPT], asked(max_tokens=1, prompt_logprobs=None))[0].num_cached_tokens == 199


@pytest.mark.parametrize("num_seqs", [1, 3, 100])
@pytest.mark.usefixtures("single_steps")
def test_a_step_has_room_for_all_logits_it_computes(monkeypatch, num_seqs, small_demo):
    with LLM(small_demo, max_num_seqs=num_seqs, max_model_len=256) as llm:
        batches = batches_of(llm, monkeypatch)
        prompts = [[i, *PROMPT[i : i + 150]] for i in range(6)]
        llm.generate(prompts, [asked(prompt_logprobs=0 if i % 3 else None) for i in range(6)])
        assert (
            LOGIT_ROWS
            <= max(batch.logit_rows.size for batch in batches)
            <= llm.engine.engine_config.max_num_logits
        )


@pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(backend, wrong):
    logits = np.zeros((3, 11), np.float32)
    logits[1, 4] = wrong
    wanted = PromptScorer(first=5, targets=[1, 2, 3], num_best=2)
    sequence = SimpleNamespace(params=SamplingParams())
    assert wanted.error(sequence) is None
    wanted.read(backend, logits)
    assert "position 6 are not finite" in wanted.error(sequence)


@pytest.mark.parametrize("fields", [{}, {"num_beams": 2}], ids=str)
def test_a_damaged_checkpoint_is_told(tmp_path, fields):
    tensors = tiny_checkpoint.random_tensors()
    tensors["transformer.wpe.weight"][1] = np.nan
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "damaged", tensors)
    with LLM(folder) as llm, pytest.raises(TinyGPTError, match="not finite"):
        llm.generate([[3, 4, 5]], asked(max_tokens=1, **fields))
