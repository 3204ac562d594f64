"""Spec decode: drafts as transformers makes them, fewer steps, and the same tokens as without it, to the bit."""

import gc
import random
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.engines import batches_of, opened, sample_of
from support.golden_models import NARROW, PROMPT, golden_ids, write_model
from support.recorded import recorded
from tinygpt import LLM, SamplingParams
from tinygpt.engine.spec_decode import propose_by_lookup
from tinygpt.errors import RequestError

pytestmark = pytest.mark.usefixtures("single_steps")  # they are counted

VOCAB = 40
FIELDS = {**NARROW, "vocab_size": VOCAB}


@recorded
def drafts_of_transformers(cases: list[tuple[list[int], int, int]]) -> np.ndarray:
    """(len(cases), 6): what each draft is, and -1 behind it."""
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    drafts = np.full((len(cases), 6), -1, np.int8)
    for row, (token_ids, count, max_ngram) in zip(drafts, cases, strict=True):
        options = {"num_output_tokens": count, "max_matching_ngram_size": max_ngram, "max_length": 10**6}
        with_draft, _ = PromptLookupCandidateGenerator(**options).get_candidates(torch.tensor([token_ids]))
        row[: with_draft.shape[1] - len(token_ids)] = with_draft[0, len(token_ids) :]
    return drafts


def test_the_drafts_are_those_of_transformers():
    chance = random.Random(0)
    texts = [chance.choices(range(4), k=chance.randint(1, 20)) for _ in range(400)]
    cases = [(token_ids, chance.randint(1, 6), chance.randint(1, 4)) for token_ids in texts]
    expected = [row[row >= 0].tolist() for row in drafts_of_transformers(cases)]
    assert 0 < sum(map(bool, expected)) < len(cases)
    assert [propose_by_lookup(*case) for case in cases] == expected


def test_a_lookup_of_long_ngrams_takes_milliseconds():
    """A request's max_matching_ngram_size may be any number: all others wait for its lookups."""
    began = time.thread_time()
    assert propose_by_lookup([5] * 2000 + [6], 4, 2000) == []
    assert propose_by_lookup(random.Random(0).choices(range(2), k=2000), 4, 2000)
    assert time.thread_time() - began < 0.5


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Held to two tokens it writes one of them again and again, as this seed's embeddings have it."""
    return write_model(tmp_path_factory.mktemp("target"), "c", **FIELDS)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("draft"), "draft", **{**FIELDS, "n_layer": 1, "n_positions": 30}
    )


llm = opened("target")


def plain(output) -> list[tuple]:
    return [
        (o.token_ids, o.logprobs, o.cumulative_logprob, o.finish_reason, o.stop_reason)
        for o in output.outputs
    ]


def random_params(chance: random.Random, **fields) -> SamplingParams:
    return SamplingParams(
        max_tokens=chance.randint(1, 25),
        temperature=chance.choice((0, 0, 0.5, 1.0)),
        seed=chance.randint(0, 99),
        n=chance.choice((1, 1, 2)),
        logprobs=chance.choice((None, 2)),
        top_k=chance.choice((0, 3)),
        top_p=chance.choice((1.0, 0.8)),
        top_p_decay=chance.choice((1.0, 0.9)),
        repetition_penalty=chance.choice((1.0, 0.7, 1.5)),
        no_repeat_ngram_size=chance.choice((0, 0, 3)),
        presence_penalty=chance.choice((0.0, -1.0)),
        min_tokens=chance.choice((0, 1)),
        eos_token_id=chance.choice((None, chance.sample(range(VOCAB), 3))),
        allowed_token_ids=chance.choice((None, [3, 7, 9, 11, 13, 17, 21, 25])),
        **fields,
    )


@pytest.fixture(scope="module")
def alone(target, precision):
    with LLM(target, **precision) as llm:
        yield llm


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_draft_model", [False, True])
def test_nothing_changes_but_the_number_of_steps(target, smaller, alone, precision, seed, with_draft_model):
    chance = random.Random(seed)
    prompts = [
        PROMPT[: chance.randint(1, 6)] + golden_ids(chance.randint(0, 20), str(i), VOCAB) for i in range(10)
    ]
    params = [random_params(chance) for _ in prompts]
    expected = [plain(alone.generate([prompt], p)[0]) for prompt, p in zip(prompts, params, strict=True)]
    lookup = [
        replace(
            p,
            prompt_lookup_num_tokens=chance.choice((0, 1, 4, 10)),
            max_matching_ngram_size=chance.choice((1, 3)),
        )
        for p in params
    ]
    draft = {"draft_model": str(smaller), "num_speculative_tokens": 3} if with_draft_model else {}
    sizes = {"max_num_seqs": chance.choice((3, 5, 8)), "max_num_batched_tokens": chance.choice((8, 13, 100))}
    with LLM(target, prefix_cache_seqs=chance.choice((0, 3)), **sizes, **draft, **precision) as other:
        assert [plain(output) for output in other.generate(prompts, lookup)] == expected


def test_lookup_saves_steps(llm, monkeypatch):
    passes = batches_of(llm, monkeypatch)
    params = SamplingParams(max_tokens=24, allowed_token_ids=[3, 9])
    llm.generate([PROMPT], params)
    without = len(passes)
    llm.generate([PROMPT], replace(params, prompt_lookup_num_tokens=6))
    assert len(passes) - without < without / 2


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_draft_model_that_is_always_right_saves_all_it_can(target, monkeypatch, temperature):
    params = SamplingParams(max_tokens=25, temperature=temperature, seed=5, repetition_penalty=1.2)
    with LLM(target, max_num_seqs=1, prefix_cache_seqs=0, draft_model=str(target)) as llm:
        passes = batches_of(llm, monkeypatch)
        for prompt in (PROMPT, PROMPT[:2], [5] * 20):  # one after another in the same row
            passes.clear()
            llm.generate([prompt], params)
            assert [len(batch.token_ids) for batch in passes] == [len(prompt) + 4, 5, 5, 5, 5]


def test_drafts_stay_within_the_positions(target, smaller):
    """The reference notices a position that is not there."""
    params = SamplingParams(max_tokens=58, prompt_lookup_num_tokens=20, allowed_token_ids=[3, 9])
    for fields in ({}, {"prompt_lookup_num_tokens": 0}):
        with LLM(target, device="reference", draft_model=str(smaller)) as llm:
            assert len(sample_of(llm, PROMPT, replace(params, **fields)).token_ids) == 58


def test_a_draft_that_cannot_go_on_ends_there(target):
    """Behind the end of the sequence no token is left that is not a repetition."""
    params = SamplingParams(
        max_tokens=20, allowed_token_ids=[3, 9], no_repeat_ngram_size=2, stop_token_ids=[3, 9]
    )
    with LLM(target, draft_model=str(target), num_speculative_tokens=12) as llm:
        assert len(sample_of(llm, [1, 2], params).token_ids) == 1


def test_an_end_among_confirmed_tokens_is_the_end(target, llm):
    tokens = sample_of(llm, PROMPT, max_tokens=12).token_ids
    params = SamplingParams(max_tokens=12, stop_token_ids=[tokens[7]])
    with LLM(target, draft_model=str(target), num_speculative_tokens=12) as other:
        output = sample_of(other, PROMPT, params)
    assert output.token_ids == tokens[: tokens.index(tokens[7]) + 1]
    assert output.finish_reason == "stop"


def test_users_functions_are_not_called_for_drafts(target, llm):
    seen = []
    note = {"logits_processors": lambda prompt, new, scores: seen.append([*new]) or scores}
    params = SamplingParams(max_tokens=10, **note)
    with LLM(target, draft_model=str(target)) as other:
        tokens = sample_of(other, PROMPT, params).token_ids
    assert seen == [tokens[:i] for i in range(10)]


class Reader:
    """Has its request's future, as a server's request has."""

    def take(self, chunk):
        pass


def test_a_request_whose_reader_has_its_future_is_freed(target):
    with LLM(target, draft_model=str(target), device="reference") as llm:
        reader = Reader()
        reader.future = llm.submit(PROMPT, SamplingParams(max_tokens=6), on_chunk=reader.take)
        reader.future.result()
        llm.generate([PROMPT], max_tokens=1)  # so that no step has the request at hand
        freed = weakref.ref(reader)
        del reader
        gc.collect()
        assert freed() is None


def test_another_vocabulary_is_refused(target, tmp_path):
    other = write_model(tmp_path, **{**FIELDS, "vocab_size": 41})
    with pytest.raises(RequestError, match="same vocabulary"):
        LLM(target, draft_model=str(other))
