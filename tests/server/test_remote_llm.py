"""RemoteLLM and the server: outputs equal the LLM's to the bit, and cancelled requests free their slots."""

import asyncio
import dataclasses
import inspect

import numpy as np
import pytest

from support.engines import SAMPLED, WAYS
from support.gate import Gate
from support.serving import served, until
from support.tables import rows
from tinygpt import LLM, AsyncLLM, RemoteLLM, SamplingParams
from tinygpt.errors import QueueFullError, RequestError, ServerError, TinyGPTError

PROMPTS = ["Once upon a time", "", [46, 1364, 555], "näh 🐺"]


@pytest.fixture(params=["/v1/"])  # the address may be the one that OpenAI's clients are given
def remote(server, request):
    with RemoteLLM(
        f"http://127.0.0.1:{server.port}{request.param}", max_retries=0, split_special_tokens=True
    ) as remote:
        yield remote


def told(output):
    """Return an output without its times and its cache hits, which depend on earlier requests."""
    return repr(dataclasses.replace(output, metrics=None, num_cached_tokens=0))


@pytest.mark.parametrize("name", WAYS)
def test_an_output_is_the_librarys(remote, llm, name):
    params = SamplingParams(**WAYS[name])
    prompts = PROMPTS if name in ("sampled", "log probabilities") else PROMPTS[:1]
    assert [*map(told, remote.generate(prompts, params))] == [*map(told, llm.generate(prompts, params))]


@pytest.mark.parametrize("remote", ["", "/", "/v1", "/v1/"], indirect=True)
@pytest.mark.parametrize("name", ["greedy", "log probabilities", "samples", "stop strings"])
def test_a_stream_is_the_librarys(remote, llm, name):
    params = SamplingParams(**WAYS[name])
    found = [*remote.stream("Once upon", params)]
    expected = [*llm.stream("Once upon", params)]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert [*map(repr, found)] == [*map(repr, expected)] or params.n > 1


def test_a_callback_gets_the_chunks_and_the_future_the_output(remote, llm):
    params = SamplingParams(**WAYS["log probabilities"])
    chunks = []
    output = remote.submit("Once upon", params, chunks.append).result(60)
    assert [*map(repr, chunks)] == [*map(repr, llm.stream("Once upon", params))]
    assert told(output) == told(*llm.generate("Once upon", params))


def test_a_request_that_fails_is_returned_and_the_others_are_finished(remote, llm):
    fails = SamplingParams(max_tokens=9, allowed_token_ids=[11], no_repeat_ngram_size=1)
    params = [SamplingParams(max_tokens=5), fails, SamplingParams(max_tokens=5)]
    found = dict(remote.generate_as_finished(["Once", "Once", "The"], params, return_exceptions=True))
    assert "leave no token to choose" in str(found[1])
    assert isinstance(found[1], TinyGPTError)
    assert [told(found[i]) for i in (0, 2)] == [*map(told, llm.generate(["Once", "The"], params[0]))]
    with pytest.raises(TinyGPTError, match="leave no token to choose"):
        list(remote.generate_as_finished(["Once", "Once"], params[:2]))


def test_asyncio(remote, llm):
    async def run():
        async with AsyncLLM(remote) as front:
            params = SamplingParams(**SAMPLED)
            outputs = await asyncio.gather(*(front.generate(prompt, params) for prompt in PROMPTS))
            return outputs, [chunk async for chunk in front.stream("Once upon", params)]

    outputs, chunks = asyncio.run(run())
    assert [*map(told, outputs)] == [*map(told, llm.generate(PROMPTS, **SAMPLED))]
    assert chunks == [*llm.stream("Once upon", **SAMPLED)]


def test_methods_have_an_llms_parameters(remote):
    for name in (
        "read_prompt",
        "generate",
        "generate_as_finished",
        "stream",
        "submit",
        "score",
        "embed",
        "close",
    ):
        theirs, mine = (
            inspect.signature(getattr(kind, name)).parameters.values() for kind in (LLM, RemoteLLM)
        )
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs], (
            name
        )


@pytest.mark.parametrize("is_split", [None, False, True])
def test_scores_are_the_librarys(remote, llm, is_split):
    for prompt, continuations in (
        ("He was the son of the", [" king", " spoon", "<|endoftext|>"]),
        ("He was the son of the ", "king"),
        ([46, 1364], [[555], [262, 263]]),
        ("", [" Once upon a time"]),
        ([5] * 500, [[6] * 13]),
    ):
        expected = llm.score(prompt, continuations, split_special_tokens=is_split)
        assert repr(remote.score(prompt, continuations, split_special_tokens=is_split)) == repr(expected)
    many = [[token_id] for token_id in range(300)]
    assert remote.score("Once", many) == llm.score("Once", many)


@pytest.mark.parametrize("continuations", [[[6] * 14], [""], [[999_999]], [[1.5]]])
def test_continuations_that_are_not_possible(remote, continuations):
    with pytest.raises(RequestError):
        remote.score([5] * 500, continuations)


def test_embeddings_are_the_librarys(remote, llm):
    prompts = ["a wolf", [46, 1364], llm.read_prompt("kings<|endoftext|>", True)]
    for pooling in ("last", "mean"):
        found = remote.embed(prompts, pooling)
        assert found.dtype == np.float32
        assert found.flags.writeable
        np.testing.assert_array_equal(found, llm.embed(prompts, pooling))
    assert remote.embed([]).shape == llm.embed([]).shape
    with pytest.raises(RequestError, match="pooling"):
        remote.embed("a wolf", "max")


def test_the_tokenizer_is_the_servers(remote, llm):
    text = "A wolf 🐺<|endoftext|> näh"
    for is_split in (None, False, True):
        ids = llm.tokenizer.encode(text, is_split)
        assert remote.tokenizer.encode(text, is_split) == ids
        assert remote.tokenizer([text, "b"], is_split) == llm.tokenizer([text, "b"], is_split)
        assert remote.tokenizer.decode(ids) == llm.tokenizer.decode(ids) == text
        skipped = llm.tokenizer.decode(ids, skip_special_tokens=True)
        assert remote.tokenizer.decode(ids, skip_special_tokens=True) == skipped
    for wrong in (lambda: remote.tokenizer.encode(5), lambda: remote.tokenizer.encode("\ud800")):
        with pytest.raises(RequestError):
            wrong()


def test_a_prompt_that_was_read_is_what_it_was_read_as(remote, llm):
    text = "Once<|endoftext|> upon"
    for is_split in (None, False, True):
        prompt = remote.read_prompt(text, is_split)
        expected = llm.read_prompt(text, is_split)
        assert prompt == expected
        found, wanted = (each.generate(prompt, max_tokens=3)[0] for each in (remote, llm))
        assert told(found) == told(wanted)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    rows("""
Once | {"max_tokens": 5000}
[999999] | {}
Once | {"soft_prompt": "none"}
Once | {"allowed_token_ids": [999999]}
"""),
)
def test_a_refusal_is_the_librarys(remote, llm, prompt, asked):
    params = SamplingParams(**asked)
    with pytest.raises(RequestError) as expected:
        llm.generate([prompt], params)
    for call in (remote.generate, lambda *given: remote.stream(prompt, params)):
        with pytest.raises(RequestError) as found:
            call([prompt], params)
        assert str(found.value) == str(expected.value)


def test_a_body_over_the_limit_is_told_so(llm):
    """Though all of it is sent before the reply is read, and no socket holds as much. The connection is kept."""
    with (
        served(llm, max_body_bytes=1000) as server,
        RemoteLLM(f"http://127.0.0.1:{server.port}", max_retries=0) as remote,
    ):
        with pytest.raises(
            RequestError, match=r"^the body is longer than the 1000 bytes that this server reads"
        ):
            remote.generate("a " * 2**24)
        assert remote.generate("Once", max_tokens=1)


@pytest.mark.parametrize("how", ["future", "queued", "iterator", "task", "error beside it", "close"])
def test_what_is_not_wanted_any_more_is_freed(server, llm, how):
    scheduler = llm.engine.scheduler
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    remote = RemoteLLM(f"http://127.0.0.1:{server.port}", max_retries=0)
    with llm.engine.wrapped(Gate) as gate:
        others = fill_slots(llm, gate, params) if how == "queued" else []
        if how in ("future", "queued", "close"):
            future = remote.submit("Once", params)
            until(lambda: llm.engine._inbox.qsize() == 1) if others else gate.wait_until_asked(1)
        else:
            gate.allow(2)
        if how == "queued":
            gate.allow(1)
            until(lambda: len(scheduler.waiting) == 1)
            assert future.cancel()
            until(lambda: not scheduler.waiting or gate.allow(1))
            assert len(scheduler.running) == 4
        elif how == "future":
            assert future.cancel()
        elif how == "iterator":
            chunks = remote.stream("Once", params)
            next(chunks)
            chunks.close()
        elif how == "task":
            asyncio.run(leave_after_one_chunk(remote, params))
        elif how == "error beside it":
            with pytest.raises(RequestError, match="999999"):
                remote.generate(["Once", [999_999]], params)
        else:
            remote.close()
            with pytest.raises(RequestError, match="has been closed"):
                future.result(60)
        for other in others:
            other.cancel()
        # A step for each look, until the server has noticed.
        until(lambda: (scheduler.running == [] and not scheduler.waiting) or gate.allow(1))
        assert gate.num_taken < 300  # of the 400 that it was about
    remote.close()


def fill_slots(llm, gate, params):
    """Requests that have all slots, one of them in its second step and the others in their first."""
    futures = [llm.submit("Once", params)]
    gate.wait_until_asked(1)
    futures += [llm.submit("Once", params) for _ in range(3)]
    gate.allow(1)
    gate.wait_until_asked(2)
    assert len(llm.engine.scheduler.running) == 4
    return futures


async def leave_after_one_chunk(remote, params):
    chunks = AsyncLLM(remote).stream("Once", params)
    async for _ in chunks:
        break
    await chunks.aclose()


def test_a_full_queue_is_told(server, llm, remote):
    with llm.engine.wrapped(Gate) as gate:
        params = SamplingParams(max_tokens=5, seed=1)
        others = fill_slots(llm, gate, params)
        futures = [remote.submit("Once", params) for _ in range(3)]
        until(lambda: llm.engine._inbox.qsize() == 3)
        with pytest.raises(QueueFullError):
            remote.generate("Once")
        gate.allow(float("inf"))
        assert len({told(future.result(60)) for future in others + futures}) == 1


def test_a_full_queue_is_waited_for(server, llm):
    with RemoteLLM(f"http://127.0.0.1:{server.port}", max_connections=7) as remote:
        outputs = remote.generate([[token_id] for token_id in range(100, 130)], max_tokens=2)
    assert [output.prompt_token_ids for output in outputs] == [[token_id] for token_id in range(100, 130)]


def test_keys(llm, monkeypatch):
    monkeypatch.delenv("TINYGPT_API_KEY", raising=False)
    with served(llm, api_keys=("a secret",)) as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(
            ServerError, match="wants an API key: set api_key, or the variable TINYGPT_API_KEY"
        ):
            RemoteLLM(url)
        with pytest.raises(ServerError, match=r"^(?!.*wrong).*wants another API key than the one given"):
            RemoteLLM(url, api_key="wrong")
        monkeypatch.setenv("TINYGPT_API_KEY", "a secret")
        for key in (None, "a secret"):
            with RemoteLLM(url, api_key=key) as remote:
                assert remote.generate("Once", max_tokens=1)
