"""Requests that come, go and share what their prompts begin with: each gets the bits that it gets alone."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import tiny_checkpoint
from support.demo import EOS
from tinygpt import LLM, AsyncLLM, SamplingParams
from tinygpt.engine.model_runner import ModelRunner
from tinygpt.errors import RequestError
from tinygpt.outputs import CompletionOutput

pytestmark = pytest.mark.usefixtures("single_steps")  # they are counted

# max_num_seqs, max_num_batched_tokens, prefix_cache_seqs
SIZES = [(1, 1, 0), (1, 64, 2), (3, 3, 1), (4, 7, 0), (4, 64, 3), (6, 17, 2)]
BASES = np.random.default_rng(0).integers(EOS, size=(2, 60)).tolist()
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def alone(small_demo):
    """Runs one request at a time and keeps nothing in between."""
    with LLM(small_demo, max_num_seqs=1, prefix_cache_seqs=0) as llm:
        yield llm


@pytest.fixture(scope="module", params=SIZES, ids=str)
def busy(request, small_demo):
    max_num_seqs, max_num_batched_tokens, prefix_cache_seqs = request.param
    sizes = {"max_num_batched_tokens": max_num_batched_tokens, "prefix_cache_seqs": prefix_cache_seqs}
    with LLM(small_demo, max_num_seqs=max_num_seqs, **sizes) as llm:
        yield llm


@dataclass(frozen=True)
class Visit:
    """A request, the step before which it comes, and how many steps later it is given up, if it is."""

    prompt: list[int]
    cache_salt: str | None
    params: SamplingParams
    arrival: int
    patience: int | None


prompts = st.builds(
    lambda base, count, tail: BASES[base][:count] + tail,
    st.integers(0, 1),
    st.sampled_from([1, 2, 17, 40, 60]),
    st.lists(st.integers(0, 3), max_size=3),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 3]),
    best_of=st.sampled_from([None, None, 4]),
    logprobs=st.sampled_from([None, 0, 2]),
    stop=st.sampled_from([None, "e", ["the ", "\x00"]]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    no_repeat_ngram_size=st.sampled_from([0, 2]),
    min_tokens=st.sampled_from([0, 1]),
    min_p=st.sampled_from([0.0, 0.05]),
    logit_bias=st.sampled_from([None, {11: 4.0}]),
    ignore_eos=st.booleans(),
)
salts = st.sampled_from([None, "red", "blue"])
visits = st.builds(Visit, prompts, salts, params, st.integers(0, 12), st.sampled_from([None, None, 0, 1, 3]))


def salted(prompt: list[int] | str, cache_salt: str | None) -> dict:
    return {"prompt": prompt, "cache_salt": cache_salt}


def run(llm: LLM, visits: list[Visit]) -> list[list[CompletionOutput] | None]:
    """Each visit's samples, None for one that was given up before its end."""
    requests = [llm._inputs.request(salted(visit.prompt, visit.cache_salt), visit.params) for visit in visits]
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
    return [request.output().outputs if i in finished else None for i, request in enumerate(requests)]


@given(visits=st.lists(visits, min_size=1, max_size=8))
@settings(max_examples=12)
def test_whoever_else_comes_and_goes(alone, busy, visits):
    """Tokens, texts, logprobs: equal, not close."""
    got = busy.engine.call(lambda: run(busy, visits))
    scheduler = busy.engine.scheduler
    assert (scheduler.running, len(scheduler.waiting)) == ([], 0)
    assert scheduler.slots.num_free == busy.engine.engine_config.max_num_seqs
    for visit, outputs in zip(visits, got, strict=True):
        if outputs is not None:
            assert outputs == alone.generate([visit.prompt], visit.params)[0].outputs


def computed(llm: LLM, monkeypatch) -> list[int]:
    """Will hold the number of tokens of each step that `llm` takes."""
    counts, forward = [], llm.engine.runner.forward
    monkeypatch.setattr(
        llm.engine.runner, "forward", lambda batch: counts.append(batch.token_ids.size) or forward(batch)
    )
    return counts


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("params", [{"n": 4}, {"n": 2, "best_of": 4}], ids=str)
def test_one_prompt_pass_for_all_samples(monkeypatch, kept, params, small_demo):
    with LLM(small_demo, max_num_seqs=8, prefix_cache_seqs=kept) as llm:
        counts = computed(llm, monkeypatch)
        params = {"temperature": 1.0, "seed": 5, **params}
        (output,) = llm.generate([BASES[0]], SamplingParams(max_tokens=5, ignore_eos=True, **params))
    assert sum(counts) == 60 + 3 + 4 * 4
    assert (len(output.outputs), output.num_cached_tokens) == (params["n"], 0)


def test_one_prompt_pass_for_equal_prompts_and_beginnings(monkeypatch, alone, small_demo):
    batch = [BASES[0], BASES[0], BASES[0][:50], BASES[0] + [5, 6]]
    with LLM(small_demo, max_num_seqs=8, prefix_cache_seqs=0) as llm:
        counts = computed(llm, monkeypatch)
        outputs = llm.generate(batch, GREEDY)
    assert sum(counts) == 60 + 1 + 1 + 2 + 4 * 5
    assert [output.num_cached_tokens for output in outputs] == [0, 59, 49, 60]
    assert outputs[3].outputs == alone.generate([batch[3]], GREEDY)[0].outputs


def test_a_later_request_computes_what_is_new(monkeypatch, alone, small_demo):
    with LLM(small_demo, max_num_seqs=2, prefix_cache_seqs=1) as llm:
        (first,) = llm.generate([BASES[0]], GREEDY)
        counts = computed(llm, monkeypatch)
        longer = BASES[0] + first.outputs[0].token_ids + [7, 8, 9]
        (second,) = llm.generate([longer], GREEDY)
        assert (second.num_cached_tokens, sum(counts)) == (65, 4 + 5)  # the last new token was never computed
        assert second.outputs == alone.generate([longer], GREEDY)[0].outputs
        (third,) = llm.generate([BASES[0][:30]], GREEDY)
        assert third.num_cached_tokens == 29


def test_only_so_many_are_kept(monkeypatch, small_demo):
    with LLM(small_demo, max_num_seqs=2, prefix_cache_seqs=2) as llm:
        heads = [[head] * 30 for head in (1, 2, 3)]
        for head in heads:
            llm.generate([head], GREEDY)
        reused = [llm.generate([head], GREEDY)[0].num_cached_tokens for head in (heads[0], heads[2])]
    assert reused == [0, 29]


def test_what_failed_is_not_kept(tmp_path):
    """Its numbers that are not finite would spread to one that fails neither alone nor beside it."""
    tensors = tiny_checkpoint.random_tensors()
    tensors["transformer.wpe.weight"][3:] = np.nan
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "damaged", tensors)
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=3, seed=0)
    with LLM(str(folder), prefix_cache_seqs=0) as llm:
        expected = llm.generate([[3, 4, 5]], params)[0].outputs
    with LLM(str(folder), prefix_cache_seqs=4) as llm:
        with pytest.raises(ValueError, match="not finite"):
            llm.generate([[3, 4, 6, 7]], params)
        (output,) = llm.generate([[3, 4, 5]], params)
    assert (output.outputs, output.num_cached_tokens) == (expected, 0)


@pytest.mark.parametrize("salts", [("red", "blue"), (None, "red"), ("red", None)], ids=str)
def test_prompts_of_other_salts_share_nothing(monkeypatch, alone, salts, small_demo):
    """Neither while both run nor later; each is computed as if it were alone, to the same bits."""
    prompts = [salted(BASES[0], salt) for salt in salts]
    expected = alone.generate([BASES[0]], GREEDY)[0].outputs
    with LLM(small_demo, max_num_seqs=4, prefix_cache_seqs=4) as llm:
        counts = computed(llm, monkeypatch)
        outputs = llm.generate(prompts, GREEDY)
        assert sum(counts) == 2 * (60 + 5)
        (other,) = llm.generate(salted(BASES[0], "green"), GREEDY)
        again = llm.generate(prompts, GREEDY)
    assert [output.num_cached_tokens for output in [*outputs, other]] == [0, 0, 0]
    assert [output.num_cached_tokens for output in again] == [59, 59]  # each its own
    assert all(output.outputs == expected for output in [*outputs, other, *again])


def test_prompts_of_equal_salts_share(alone, small_demo):
    prompts = [salted(BASES[0], "".join(["re", "d"])), {"prompt_token_ids": BASES[0], "cache_salt": "red"}]
    with LLM(small_demo, max_num_seqs=4, prefix_cache_seqs=4) as llm:
        outputs = llm.generate(prompts, GREEDY) + llm.generate(prompts[:1], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0, 59, 59]
    assert outputs[2].outputs == alone.generate([BASES[0]], GREEDY)[0].outputs


def test_the_salt_of_the_llm_is_that_of_all_without_one(monkeypatch, small_demo):
    with LLM(small_demo, cache_salt="red") as llm:
        llm.generate([BASES[0]], GREEDY)
        given = [salted(BASES[0], "red"), salted(BASES[0], None), BASES[0], salted(BASES[0], "blue")]
        assert [llm.generate([prompt], GREEDY)[0].num_cached_tokens for prompt in given] == [59, 59, 59, 0]


def test_every_entry_takes_a_salt(monkeypatch, small_demo):
    """Each reads a prompt that was read with no salt before, and nothing of what it has read itself."""
    entries = {
        "generate": lambda llm, prompt: llm.generate(prompt, GREEDY),
        "read_prompt": lambda llm, prompt: llm.generate(llm.read_prompt(prompt), GREEDY),
        "stream": lambda llm, prompt: list(llm.stream(prompt, GREEDY)),
        "submit": lambda llm, prompt: llm.submit(prompt, GREEDY).result(),
        "async": lambda llm, prompt: asyncio.run(AsyncLLM(llm).generate(prompt, GREEDY)),
        "score": lambda llm, prompt: llm.score(prompt, [[5, 6, 7]]),
    }
    with LLM(small_demo, max_num_seqs=2, prefix_cache_seqs=4) as llm:
        llm.generate([BASES[0]], GREEDY)
        counts = computed(llm, monkeypatch)
        for name, call in entries.items():
            counts.clear()
            call(llm, salted(BASES[0], name))
            first = sum(counts)
            call(llm, salted(BASES[0], name))
            assert (first >= 60, sum(counts) - first < 10) == (True, True), name


def test_a_session_shares_by_its_salt(small_demo):
    def cached_tokens(session):
        session.extend(BASES[0])
        return session.generate(GREEDY).num_cached_tokens

    with LLM(small_demo) as llm:
        llm.generate([BASES[0]], GREEDY)
        sessions = [llm.session(), llm.session(cache_salt="red"), llm.session("red"), llm.session("blue")]
        assert [cached_tokens(session) for session in sessions] == [59, 0, 59, 0]
        fork = sessions[3].fork()
        fork.extend([5])
        assert fork.generate(GREEDY).num_cached_tokens == 65  # the last that was sampled has not been computed


def test_a_draft_model_shares_by_salt(monkeypatch, small_demo):
    """Its slots are those of the larger model: what they hold of one salt is of no use to another."""
    counts, forward = [], ModelRunner.forward

    def counted(runner, batch):
        if runner is not llm.engine.runner:
            counts.append(batch.token_ids.size)
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    with LLM(small_demo, draft_model=small_demo, max_num_seqs=1, prefix_cache_seqs=0) as llm:
        for cache_salt, reads_all in (("red", True), ("red", False), ("blue", True), (None, True)):
            counts.clear()
            llm.generate(salted(BASES[0], cache_salt), GREEDY)
            assert (sum(counts) >= 60) == reads_all


@pytest.mark.parametrize("cache_salt", ["", 7, True, b"red", ["red"]], ids=str)
def test_impossible_salts(alone, cache_salt):
    message = "cache_salt is .* and must be a text that is not empty"
    for call in (
        lambda: LLM("nowhere", cache_salt=cache_salt),
        lambda: alone.generate(salted(BASES[0], cache_salt)),
        lambda: alone.score(salted(BASES[0], cache_salt), [[5]]),
        lambda: alone.session(cache_salt),
    ):
        with pytest.raises(RequestError, match=message):
            call()


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"cache_salt": "a"},
        {"prompt": [1], "prompt_token_ids": [1]},
        {"prompt": [1], "salt": "a"},
        {"prompt": [1], 5: 6},
    ],
    ids=str,
)
def test_impossible_dicts(alone, prompt):
    with pytest.raises(RequestError, match=r"a prompt is a dict with .*: give one of prompt and prompt_token_ids"):
        alone.generate(prompt)


def test_impossible_sizes():
    for sizes, message in (
        ({"max_num_seqs": 4, "max_num_batched_tokens": 3}, "max_num_batched_tokens is 3 and max_num_seqs is 4"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"prefix_cache_seqs": -1}, "prefix_cache_seqs is -1"),
        ({"prefix_cache_seqs": None}, "prefix_cache_seqs is None"),
        ({"max_queue": -1}, "max_queue is -1"),
    ):
        with pytest.raises(RequestError, match=message):
            LLM("demo", **sizes)
