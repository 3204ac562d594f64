"""Requests that come, go and share what their prompts begin with: each gets the bits that it gets alone."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import tiny_checkpoint
from support.engines import batches_of, sizes
from support.gate import paused
from support.paths import EOS
from support.sampling import any_params
from tinygpt import LLM, SamplingParams
from tinygpt.errors import FailedRequestError
from tinygpt.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("single_steps")  # they are counted

SIZES = [(1, 1, 0), (1, 64, 2), (3, 3, 1), (4, 7, 0), (4, 64, 3), (6, 17, 2)]
# 70 tokens cross the border of a block of positions.
BASES = np.random.default_rng(0).integers(EOS, size=(2, 70)).tolist()
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def alone(small_demo, precision):
    with LLM(small_demo, **precision, max_num_seqs=1, prefix_cache_seqs=0) as llm:
        yield llm


@pytest.fixture(scope="module", params=SIZES, ids=str)
def busy(request, small_demo, precision):
    with LLM(small_demo, **precision, **sizes(*request.param)) as llm:
        yield llm


@dataclass(frozen=True)
class Visit:
    prompt: list[int]
    params: SamplingParams
    arrival: int
    patience: int | None


prompts = st.builds(
    lambda base, count, tail: BASES[base][:count] + tail,
    st.integers(0, 1),
    st.sampled_from([1, 2, 17, 40, 70]),
    st.lists(st.integers(0, 3), max_size=3),
)
visits = st.builds(Visit, prompts, any_params(), st.integers(0, 12), st.sampled_from([None, None, 0, 1, 3]))


def run(llm: LLM, visits: list[Visit]) -> list[RequestOutput | None]:
    """Each visit's output, None for one that was given up before its end."""
    requests = [llm._inputs.request(visit.prompt, visit.params) for visit in visits]
    finished = set()
    for i, request in enumerate(requests):
        request.when_finished(lambda i=i: finished.add(i))
    step, gone = 0, set()
    while len(finished | gone) < len(visits):
        for i, visit in enumerate(visits):
            if visit.arrival == step:
                llm.engine._steps.add(requests[i].sequences)
            if visit.patience is not None and visit.arrival + visit.patience == step and i not in finished:
                llm.engine._steps.remove(requests[i].sequences)
                gone.add(i)
        llm.engine._steps.step()
        step += 1
    return [request.output() if i in finished else None for i, request in enumerate(requests)]


@given(visits=st.lists(visits, min_size=1, max_size=8))
@settings(max_examples=12)
def test_whoever_else_comes_and_goes(alone, busy, visits):
    got = busy.engine.call(lambda: run(busy, visits))
    scheduler = busy.engine.scheduler
    assert (scheduler.running, len(scheduler.waiting)) == ([], 0)
    assert scheduler.slots.num_free == busy.engine.engine_config.max_num_seqs
    for visit, output in zip(visits, got, strict=True):
        if output is not None:
            (expected,) = alone.generate([visit.prompt], visit.params)
            assert (output.outputs, output.prompt_logprobs) == (expected.outputs, expected.prompt_logprobs)
            assert output.prompt_cumulative_logprob == expected.prompt_cumulative_logprob


def num_computed(batches: list) -> int:
    return sum(batch.token_ids.size for batch in batches)


def test_one_prompt_pass_for_equal_prompts_and_beginnings(monkeypatch, alone, small_demo, precision):
    batch = [BASES[0], BASES[0], BASES[0][:50], BASES[0] + [5, 6]]
    with LLM(small_demo, **precision, max_num_seqs=8, prefix_cache_seqs=0) as llm:
        batches = batches_of(llm, monkeypatch)
        outputs = llm.generate(batch, GREEDY)
    assert num_computed(batches) == 70 + 1 + 1 + 2 + 4 * 5
    assert [output.num_cached_tokens for output in outputs] == [0, 69, 49, 70]
    assert outputs[3].outputs == alone.generate([batch[3]], GREEDY)[0].outputs


def test_a_later_request_computes_what_is_new(monkeypatch, alone, small_demo, precision):
    with LLM(small_demo, **precision, max_num_seqs=2, prefix_cache_seqs=1) as llm:
        (first,) = llm.generate([BASES[0]], GREEDY)
        batches = batches_of(llm, monkeypatch)
        longer = BASES[0] + first.outputs[0].token_ids + [7, 8, 9]
        (second,) = llm.generate([longer], GREEDY)
        assert (second.num_cached_tokens, num_computed(batches)) == (
            75,
            4 + 5,
        )  # the last new token was never computed
        assert second.outputs == alone.generate([longer], GREEDY)[0].outputs
        (third,) = llm.generate([BASES[0][:30]], GREEDY)
        assert third.num_cached_tokens == 29


def test_what_failed_is_not_kept(tmp_path):
    """Its numbers that are not finite would spread to one that fails neither alone nor beside it."""
    folder = tiny_checkpoint.write_damaged(tmp_path / "damaged")
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=3, seed=0)
    with LLM(folder, prefix_cache_seqs=0) as llm:
        expected = llm.generate([[3, 4, 5]], params)[0].outputs
    with LLM(folder, prefix_cache_seqs=4) as llm:
        with pytest.raises(ValueError, match="not finite"):
            llm.generate([[3, 4, 6, 7]], params)
        (output,) = llm.generate([[3, 4, 5]], params)
    assert (output.outputs, output.num_cached_tokens) == (expected, 0)


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory):
    """A checkpoint whose last token's embedding is NaN. The head is whole."""
    generator = np.random.default_rng(0)
    tensors = tiny_checkpoint.random_tensors()
    for name, count in (("transformer.wte", 20), ("transformer.wpe", 64), ("lm_head", 20)):
        tensors[f"{name}.weight"] = generator.standard_normal((count, tiny_checkpoint.C), np.float32)
    tensors["transformer.wte.weight"][19] = np.nan
    fields = {"vocab_size": 20, "n_positions": 64, "tie_word_embeddings": False}
    return str(tiny_checkpoint.write_checkpoint(tmp_path_factory.mktemp("nan") / "model", tensors, **fields))


def hide(before, after, scores):
    return np.zeros_like(scores)


@pytest.mark.parametrize(
    "fields", [{}, {"num_beams": 3}, {"logits_processors": hide}], ids=["", "beams", "hide"]
)
@pytest.mark.parametrize("budget", [20, 64])
def test_a_neighbours_nan_is_not_copied(with_nan, fields, budget):
    """It spreads to earlier positions of its step, which a finite prompt begins with, too."""
    prompts = [[token_id] * shared + [12] for token_id, shared in enumerate((17, 18, 21, 24), 3)]
    with LLM(with_nan, prefix_cache_seqs=0) as llm:
        expected = [output.outputs for output in llm.generate(prompts, GREEDY)]
    with LLM(with_nan, **sizes(4, budget, 2)) as llm:
        for prompt, outputs in zip(prompts, expected, strict=True):
            with paused(llm):
                bad = llm.submit([*prompt[:-1], 19, *prompt], max_tokens=3, ignore_eos=True, **fields)
                good = llm.submit(prompt, GREEDY)
            with pytest.raises(FailedRequestError, match="not finite"):
                bad.result(60)
            assert good.result(60).outputs == outputs
            assert llm.generate(prompt, GREEDY)[0].outputs == outputs
