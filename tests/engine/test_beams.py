"""Beam search through LLM: transformers' results with processors, and no trace of the neighbours."""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engines import log_softmax, opened, sample_of
from support.golden_models import NARROW, PROMPT, golden_ids, write_model
from support.oracles import live_model, search
from support.recorded import recorded
from support.tables import column
from tinygpt import LLM, SamplingParams

VOCAB = 60
FIELDS = {**NARROW, "vocab_size": VOCAB}
DEMO_PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("beams"), **FIELDS)


llm = opened("folder", max_num_seqs=8)


@pytest.fixture(scope="module")
def any_llm(folder, precision):
    with LLM(folder, max_num_seqs=8, **precision) as llm:
        yield llm


demo = opened("demo")


def plain(output) -> list[tuple]:
    return [(o.token_ids, o.score, o.logprobs, o.cumulative_logprob, o.finish_reason) for o in output.outputs]


PROCESSED = column("""
{}
{"repetition_penalty": 1.3}
{"no_repeat_ngram_size": 2, "repetition_penalty": 0.8}
{"suppress_tokens": [5, 9, 11, 40], "length_penalty": -1.0}
{"bad_words_ids": [[3], [9, 3]], "early_stopping": true}
""")


@recorded
def search_of_transformers(prompt: list[int], options: dict[str, Any]) -> np.ndarray:
    return search(live_model(**FIELDS), prompt, options, pad=0)


@pytest.mark.parametrize("fields", PROCESSED, ids=str)
@pytest.mark.parametrize("eos_token_id", [None, [4, 9]])
def test_same_as_transformers_with_processors(llm, fields, eos_token_id):
    beams = {"num_beams": 4, **fields}
    output = llm.generate([PROMPT], n=4, max_tokens=14, eos_token_id=eos_token_id, **beams)[0]
    options = {"num_return_sequences": 4, "max_new_tokens": 14, "eos_token_id": eos_token_id, **beams}
    for found, (score, *row) in zip(
        output.outputs, search_of_transformers(PROMPT, options).tolist(), strict=True
    ):
        assert found.token_ids == row[: len(found.token_ids)]
        assert found.score == pytest.approx(score, abs=1e-4)
        assert found.finish_reason == ("stop" if found.token_ids[-1] in (eos_token_id or ()) else "length")


def test_min_tokens_hold_back_the_end(llm):
    params = SamplingParams(num_beams=3, max_tokens=12, eos_token_id=list(range(0, VOCAB, 2)))
    assert len(sample_of(llm, PROMPT, params).token_ids) < 8
    held_back = sample_of(llm, PROMPT, replace(params, min_tokens=8)).token_ids
    assert len(held_back) >= 8
    assert all(token_id % 2 for token_id in held_back[:8])


def test_a_logits_processor_sees_each_beam(llm):
    seen = []
    params = SamplingParams(num_beams=3, n=3, max_tokens=4)
    note = {"logits_processors": lambda prompt, new, scores: seen.append(tuple(new)) or scores}
    output = llm.generate([PROMPT], replace(params, **note))[0]
    assert plain(output) == plain(llm.generate([PROMPT], params)[0])
    assert {tuple(o.token_ids[:3]) for o in output.outputs} <= set(seen)


@pytest.mark.parametrize("count", [2, -1])
def test_logprobs_are_those_of_the_tokens(any_llm, count):
    llm = any_llm
    params = SamplingParams(num_beams=4, n=4, max_tokens=9, logprobs=count, length_penalty=0.0)
    for completion in llm.generate([PROMPT], params)[0].outputs:
        expected = log_softmax(llm.logits(PROMPT + completion.token_ids)[len(PROMPT) - 1 : -1])  # (T, V)
        for row, reported, token_id in zip(expected, completion.logprobs, completion.token_ids, strict=True):
            best = np.argsort(-row)[: row.size if count == -1 else count].tolist()
            assert set(reported) == {*best, token_id}
            assert list(reported.values()) == pytest.approx([row[i] for i in reported], abs=1e-4)
        assert completion.cumulative_logprob == pytest.approx(completion.score, abs=1e-4)  # no length penalty


def test_processed_logprobs_are_normalised_scores(llm):
    allowed = [1, 2, 3, 4]
    params = SamplingParams(
        num_beams=2, max_tokens=5, logprobs=4, logprobs_mode="processed", allowed_token_ids=allowed
    )
    for reported in sample_of(llm, PROMPT, params).logprobs:
        assert sorted(reported) == allowed
        assert sum(2.718281828**value for value in reported.values()) == pytest.approx(1, abs=1e-5)


def random_params(chance: random.Random) -> SamplingParams:
    if chance.random() < 0.5:
        return SamplingParams(
            max_tokens=chance.randint(1, 12), temperature=chance.choice((0, 1.0)), seed=1, logprobs=1
        )
    groups = chance.choice((1, 1, 2))
    return SamplingParams(
        max_tokens=chance.randint(1, 12),
        num_beams=2 * groups,
        n=chance.randint(1, 2 * groups),
        num_beam_groups=groups,
        diversity_penalty=0.5 * (groups - 1),
        logprobs=chance.choice((None, 1)),
        eos_token_id=chance.choice((None, chance.sample(range(VOCAB), 8))),
        repetition_penalty=chance.choice((1.0, 1.2)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_neighbours_chunks_and_cached_prefixes_change_nothing(folder, any_llm, precision, seed):
    chance = random.Random(seed)
    prompts = [
        PROMPT[: chance.randint(1, 6)] + golden_ids(chance.randint(0, 20), str(i), VOCAB) for i in range(12)
    ]
    params = [random_params(chance) for _ in prompts]
    alone = [plain(any_llm.generate([prompt], p)[0]) for prompt, p in zip(prompts, params, strict=True)]
    sizes = {
        "max_num_seqs": chance.choice((4, 5, 9)),
        "prefix_cache_seqs": chance.choice((0, 3)),
        **precision,
    }
    with LLM(folder, max_num_batched_tokens=chance.choice((9, 17)), **sizes) as other:
        dropped = other.generate_as_finished([PROMPT], SamplingParams(num_beams=3, max_tokens=40))
        together = other.generate_as_finished(prompts, params)
        outputs = dict([next(together)])
        dropped.close()
        outputs |= dict(together)
        assert [plain(outputs[i]) for i in range(len(prompts))] == alone


def test_what_a_search_leaves_in_the_cache_is_what_it_says(folder):
    with LLM(folder, prefix_cache_seqs=8) as cached, LLM(folder, prefix_cache_seqs=0) as fresh:
        found = cached.generate([PROMPT], num_beams=6, n=6, max_tokens=10)[0].outputs
        prompts = [PROMPT + completion.token_ids[: 2 + i] for i, completion in enumerate(found)]
        again, expected = (llm.generate(prompts, max_tokens=8, logprobs=1) for llm in (cached, fresh))
        assert [plain(output) for output in again] == [plain(output) for output in expected]
        assert sum(output.num_cached_tokens for output in again) > 6 * len(PROMPT)


def test_a_stop_string_ends_a_beam_and_is_cut_off(demo):
    params = SamplingParams(num_beams=4, n=4, max_tokens=12)
    stop = demo.tokenizer.decode(sample_of(demo, DEMO_PROMPT, params).token_ids[3:5])
    outputs = demo.generate(DEMO_PROMPT, replace(params, stop=stop))[0].outputs
    stopped = [o for o in outputs if o.finish_reason == "stop"]
    assert stopped
    assert all(o.stop_reason == stop for o in stopped)
    for completion in outputs:
        assert stop not in completion.text
        assert (stop in demo.tokenizer.decode(completion.token_ids)) == (completion in stopped)


def test_max_time_ends_a_search_with_what_it_has(llm):
    params = SamplingParams(num_beams=3, n=3, max_tokens=50)

    def slow(prompt_token_ids, new_token_ids, scores):
        if len(new_token_ids) == 3:
            time.sleep(0.6)
        return scores

    output = llm.generate([PROMPT], replace(params, max_time=0.5, logits_processors=slow))[0]
    assert [o.stop_reason for o in output.outputs] == ["max_time"] * 3
    expected = llm.generate([PROMPT], replace(params, max_tokens=4))[0]
    assert [(o.token_ids, o.score) for o in output.outputs] == [
        (o.token_ids, o.score) for o in expected.outputs
    ]


def test_a_failing_search_fails_alone(llm):
    def broken(prompt_token_ids, new_token_ids, scores):
        raise ArithmeticError("no")

    bad = llm.submit(PROMPT, num_beams=3, max_tokens=5, logits_processors=broken)
    nothing = llm.submit(PROMPT, num_beams=3, allowed_token_ids=[1], suppress_tokens=[1])
    good = llm.submit(PROMPT, num_beams=2, max_tokens=5)
    with pytest.raises(ValueError, match="broken raised"):
        bad.result(timeout=60)
    with pytest.raises(ValueError, match="leave no token"):
        nothing.result(timeout=60)
    assert plain(good.result(timeout=60)) == plain(llm.generate([PROMPT], num_beams=2, max_tokens=5)[0])
