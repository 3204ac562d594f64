"""Streams: all chunks together are what `generate` gives: texts, tokens and log probabilities, of every sample."""

import asyncio

import pytest

from support.engines import STREAMED
from tinygpt import AsyncLLM, SamplingParams

PROMPT = "Once upon a time"


def summed(chunks):
    chunks, samples = list(chunks), []
    for index in sorted({chunk.index for chunk in chunks}):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert all(chunk.finish_reason is None for chunk in own[:-1])
        logprobs = [chunk.logprobs for chunk in own if chunk.logprobs is not None]
        token_ids = [chunk.token_id for chunk in own if chunk.token_id is not None]
        text = "".join(chunk.text for chunk in own)
        samples.append((index, text, token_ids, logprobs or None, own[-1].finish_reason))
    return samples


def expected_of(output):
    return [(s.index, s.text, s.token_ids, s.logprobs, s.finish_reason) for s in output.outputs]


@pytest.mark.parametrize("name", STREAMED)
def test_all_chunks_together_are_the_output(llm, name):
    params = SamplingParams(**STREAMED[name])
    (output,) = llm.generate(PROMPT, params)
    chunks = list(llm.stream(PROMPT, params))
    assert summed(chunks) == expected_of(output)
    first = next(chunk for chunk in chunks if chunk.index == 0)
    assert first.prompt_logprobs == output.prompt_logprobs
    assert all(chunk is first or chunk.prompt_logprobs is None for chunk in chunks)
    for chunk in chunks:
        assert (chunk.logprobs is None) == (params.logprobs is None)
        assert chunk.logprobs is None or chunk.token_id in chunk.logprobs


def test_a_stream_of_asyncio_is_the_same(llm):
    async def read(params):
        return [chunk async for chunk in AsyncLLM(llm).stream(PROMPT, params)]

    async def main():
        return await asyncio.wait_for(asyncio.gather(*map(read, params)), 120)

    params = [SamplingParams(**fields) for fields in STREAMED.values()]
    for chunks, own in zip(asyncio.run(main()), params, strict=True):
        assert summed(chunks) == summed(llm.stream(PROMPT, own))


def test_equal_samples_are_computed_once(llm):
    functions = {"logits_processors": lambda prompt, new, scores: scores}  # they may change a sample
    for fields, count in (({}, 1), ({"temperature": 1.0}, 3), (functions, 3)):
        stream = llm.stream(PROMPT, n=3, max_tokens=400, ignore_eos=True, **fields)
        next(stream)
        assert len(llm.engine.scheduler.running) == count
        stream.close()


def test_equal_samples_share_no_list(llm):
    first, second = llm.generate(PROMPT, n=2, logprobs=0)[0].outputs
    assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)
    assert first.token_ids is not second.token_ids
    assert first.logprobs is not second.logprobs
    assert all(a is not b for a, b in zip(first.logprobs, second.logprobs, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_who_is_given_a_chunk_may_change_it(llm, n):
    def spoil(chunk):
        for logprobs in [chunk.logprobs, *(chunk.prompt_logprobs or ())]:
            if logprobs is not None:
                logprobs.clear()

    params = SamplingParams(n=n, logprobs=1, prompt_logprobs=1)
    spoilt = llm.submit(PROMPT, params, on_chunk=spoil).result()
    (whole,) = llm.generate(PROMPT, params)
    assert [sample.logprobs for sample in spoilt.outputs] == [sample.logprobs for sample in whole.outputs]
    assert spoilt.prompt_logprobs == whole.prompt_logprobs
