"""Requests that end with their prompt: max_tokens 0, and the reads of prompts that are made of it."""

import numpy as np
import pytest

from support.gate import Gate, assert_idle, paused, until_idle
from support.golden_models import golden_ids, write_model
from tinygpt import LLM, Edit, SamplingParams
from tinygpt.engine.engine import RequestFuture
from tinygpt.errors import FailedRequestError, RequestError

SIZES = {"n_layer": 2, "n_head": 3, "n_embd": 48, "n_positions": 128, "vocab_size": 90}


def ids_of(length: int) -> list[int]:
    return golden_ids(length, f"{length} of a prompt", SIZES["vocab_size"])


@pytest.fixture(scope="module", params=["cpu", "reference"])
def llm(request, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("prompts"), **SIZES)
    sizes = {"max_num_seqs": 4, "prefix_cache_seqs": 2, "max_num_batched_tokens": 40}
    with LLM(str(folder), device=request.param, **sizes) as llm:
        yield llm


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 2, "temperature": 1.0, "best_of": 5, "seed": 1}])
def test_no_token_follows(llm, fields):
    (output,) = llm.generate([ids_of(60)], max_tokens=0, prompt_logprobs=2, logprobs=1, **fields)
    assert [(s.token_ids, s.finish_reason, s.stop_reason, s.logprobs) for s in output.outputs] == [
        ([], "length", None, [])
    ] * fields.get("n", 1)
    assert output.metrics.first_token is None
    assert output.metrics.finished >= output.metrics.scheduled
    (followed,) = llm.generate([ids_of(60)], max_tokens=1, prompt_logprobs=2)
    assert output.prompt_logprobs == followed.prompt_logprobs
    assert output.prompt_cumulative_logprob == followed.prompt_cumulative_logprob


def test_a_prompt_may_take_all_positions(llm):
    (output,) = llm.generate([ids_of(128)], max_tokens=0)
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="has 129 tokens and max_tokens is 0"):
        llm.generate([ids_of(129)], max_tokens=0)
    with pytest.raises(RequestError, match="max_tokens is 0 and must be above 0 with num_beams"):
        llm.generate([[1]], max_tokens=0, num_beams=2)


def test_a_stream_is_one_chunk(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, capture="logits")
    (chunk,) = llm.stream(ids_of(9), params)
    (output,) = llm.generate([ids_of(9)], params)
    assert (chunk.text, chunk.token_id, chunk.finish_reason) == ("", None, "length")
    assert chunk.prompt_logprobs == output.prompt_logprobs
    np.testing.assert_array_equal(chunk.activations["logits"], llm.logits(ids_of(9)))


def test_outputs_of_the_model_are_captured_by_name_alone(llm):
    asked = {"max_tokens": 5, "ignore_eos": True}
    (output,) = llm.generate([ids_of(70)], capture=["logits", "last_hidden_state"], **asked)
    seen = output.outputs[0].activations
    ids = [*ids_of(70), *output.outputs[0].token_ids[:-1]]  # the last token never runs
    assert seen.keys() == {"logits", "last_hidden_state"}
    np.testing.assert_array_equal(seen["logits"], llm.logits(ids))
    np.testing.assert_array_equal(seen["last_hidden_state"], llm.hidden_states(ids)[-1])
    for names in (None, "*", lambda name: True):
        _, cache = llm.run_with_cache(ids_of(3), names)
        assert not {"logits", "last_hidden_state"} & {*cache}


def test_texts_are_read_in_batches_with_the_bits_of_one(llm):
    prompts = [ids_of(length) for length in (3, 1, 70, 9, 2, 8)]
    alone = [llm.embed([ids], "mean")[0] for ids in prompts]
    logits = [llm.logits(ids) for ids in prompts]
    with llm.engine.wrapped(Gate) as gate:
        gate.allow(float("inf"))
        together = llm.embed(prompts, "mean")
    np.testing.assert_array_equal(together, alone)
    assert gate.num_taken == 3  # of 40 tokens; 4 slots hold the first four prompts
    outputs = llm.generate(prompts, max_tokens=0, capture="logits")
    for output, expected in zip(outputs, logits, strict=True):
        np.testing.assert_array_equal(output.outputs[0].activations["logits"], expected)


def test_reads_can_be_cancelled(llm):
    with llm.engine.wrapped(Gate) as gate:
        futures = [RequestFuture(request) for request in llm._embedding_requests([ids_of(90)] * 9, "last")]
        llm.engine.submit(futures)
        gate.wait_until_asked(1)
        assert futures[8].cancel()
        assert futures[0].cancel()
        gate.allow(float("inf"))
        vectors = [future.result() for future in futures[1:8]]
    until_idle(llm)
    assert_idle(llm)
    np.testing.assert_array_equal(vectors, np.tile(llm.embed([ids_of(90)]), (7, 1)))


def test_a_scored_prompt_is_left_to_others(llm):
    with llm.engine.wrapped(Gate) as gate:
        gate.allow(float("inf"))
        llm.score(ids_of(50), [[7, 8]])
        (output,) = llm.generate([[*ids_of(50), 7, 9]], max_tokens=1)
    assert output.num_cached_tokens == 51
    assert gate.num_taken == 3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_fails_alone_and_is_left_to_none(llm):
    infinite = Edit("blocks.1.hook_resid_post", value=np.inf, at=slice(40, None))
    with pytest.raises(FailedRequestError, match="logits at position"):
        llm.generate([ids_of(60)], max_tokens=0, prompt_logprobs=0, edits=infinite)
    with paused(llm):
        held = [*llm.engine.scheduler.slots.prefixes.values()]
    assert not any(ids[:1] == ids_of(60)[:1] for ids in held)


@pytest.mark.parametrize("num_drafted", [0, 3])
def test_the_first_chunk_has_the_prompts_log_probabilities_next_to_drafts(llm, num_drafted):
    ids = [5, 6, 7, 8] * 4
    fields = {"max_tokens": 5, "prompt_logprobs": 1, "prompt_lookup_num_tokens": num_drafted}
    (output,) = llm.generate([ids], **fields)
    first, *others = llm.stream(ids, **fields)
    assert first.prompt_logprobs == output.prompt_logprobs
    assert [chunk.prompt_logprobs for chunk in others] == [None] * len(others)


def test_embeddings_of_tokens_are_captured_alone(llm):
    (output,) = llm.generate([ids_of(9)], max_tokens=3, ignore_eos=True, capture="hook_embed")
    seen = output.outputs[0].activations
    assert {name: rows.shape for name, rows in seen.items()} == {"hook_embed": (11, SIZES["n_embd"])}


def test_a_text_without_a_step_has_no_activations(llm):
    (output,) = llm.generate([ids_of(9)], max_tokens=3, max_time=1e-9, capture="z")
    assert output.outputs[0].stop_reason == "max_time"
    assert dict(output.outputs[0].activations) == {}
