"""Bodies and replies of megabytes: a few errors are looked for, texts are read in a thread, and written in parts."""

import asyncio
import gc
import json
import sys
import threading
import tracemalloc
from contextlib import nullcontext
from operator import attrgetter
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from support.gate import Gate, Held, noting
from support.serving import served, until
from tinygpt.aliases import OURS
from tinygpt.server import api, protocol, replies, turns
from tinygpt.server.api import MAX_LOGPROBS, Api
from tinygpt.server.chats import ChatRequest, ResponsesRequest
from tinygpt.server.protocol import MAX_FIELDS, MAX_WORDS, CompletionRequest
from tinygpt.server.refusals import to_json
from tinygpt.server.turns import json_parts, whole

MANY = 5000
FEW = 8  # errors: one for each type that a field may have, and for each part of an object
WRONG = {
    "nulls": {"prompt": [None] * MANY},
    "objects": {"prompt": [{}] * MANY},
    "lists of nulls": {"prompt": [[None] * MANY] * 9},
    "no token ids": {"stop_token_ids": [-1] * MANY, "suppress_tokens": ["a"] * MANY},
    "words": {"bad_words": [0] * MANY, "guided_choice": [0] * MANY},
    "biases": {"logit_bias": dict.fromkeys(map(str, range(MANY)), "a")},
    "keys of biases": {"logit_bias": {"a" * 2000 + str(i): 1 for i in range(100)}},
    "unknown fields": dict.fromkeys(map(str, range(MANY)), 1),
    "unknown fields inside": {"stream_options": dict.fromkeys(map(str, range(MANY)), 1)},
}
WRONG_CHATS = {
    "messages": {"messages": [{}] * MANY},
    "unknown fields of a message": {"messages": [dict.fromkeys(map(str, range(MANY)), 1)]},
    "parts": {"messages": [{"role": "user", "content": [{}] * MANY}]},
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_CHATS])
def test_of_many_errors_a_few_are_looked_for(name):
    form, body = (CompletionRequest, WRONG[name]) if name in WRONG else (ChatRequest, WRONG_CHATS[name])
    with pytest.raises(ValidationError) as found:
        form.model_validate(body)
    assert found.value.error_count() <= FEW


def test_of_many_unknown_fields_a_few_are_read(monkeypatch):
    sizes = noting(monkeypatch, protocol, "renamed", lambda given, *_: len(given))
    many = {"use_cache": True, "temp": 0.5, **WRONG["unknown fields"], "max_tokens": 3}
    asked = {CompletionRequest: {"prompt": "a"}, ResponsesRequest: {"input": "a"}}
    for form, body in asked.items():
        assert len({*form.model_fields, *form.fields_by_name(), *OURS, *protocol.IGNORED}) < MAX_FIELDS
        given = {**many, **body}
        with pytest.raises(ValidationError, match="Extra inputs"):
            form.model_validate(given)
        found = form.model_validate(given, extra="ignore")  # --unknown-fields ignore
        assert (found.temperature, found.max_tokens) == (0.5, 3)
    assert max(sizes) < MAX_FIELDS


def test_huge_bodies_are_read_one_after_the_other(server, llm, monkeypatch):
    """What runs already holds up no other."""
    monkeypatch.setattr("tinygpt.server.gate.HUGE", 9000)
    read = llm.read_prompt
    asked = {"max_tokens": 1, "user": "x" * 9000}
    with llm.engine.wrapped(Gate) as gate:
        clients = [server.begin(prompt="Once", **asked)]
        until(lambda: llm.engine.scheduler.running)
        monkeypatch.setattr(llm, "read_prompt", held := Held(read))
        clients.append(server.begin(prompt="Once", **asked))
        assert held.called.wait(60)
        monkeypatch.setattr(llm, "read_prompt", read)
        order = noting(monkeypatch, llm, "read_prompt")
        clients.append(server.begin(prompt="a", **asked))
        gate.allow(10)
        assert server.complete(prompt="Once", max_tokens=1).status == 200
        assert len(order) == 1
        held.release.set()
        assert all(client.socket.recv(100).startswith(b"HTTP/1.1 200") for client in clients)


EMPTY_LISTS = b'{"prompt": "a", "unknown": [%s]}' % b",".join([b"[]"] * 100_000)


@pytest.mark.parametrize("unknown_fields", ["refuse", "ignore"])
def test_no_collection_looks_at_the_lists_of_a_huge_body(llm, monkeypatch, unknown_fields):
    collections = []
    names = noting(monkeypatch, json, "loads", lambda text: threading.current_thread().name)
    with served(llm, unknown_fields=unknown_fields) as server:
        gc.callbacks.append(lambda phase, info: collections.append(phase))
        try:
            reply = server.ask("/v1/completions", EMPTY_LISTS)
        finally:
            gc.callbacks.pop()
    assert reply.status == {"refuse": 400, "ignore": 200}[unknown_fields]
    assert server.thread.name not in names
    assert len(collections) < 40  # a collection for every 700 lists: more than 100
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_huge_body_the_loop_is_left_as_long_as_it_took(monkeypatch, fails):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    # Of this module alone: the loop of a server in another thread sleeps, too.
    monkeypatch.setattr(turns, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=iter([2.0, 5.0]).__next__))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        asyncio.run(turns.read_huge(lambda: 1 / (not fails)))
    assert waits == [3.0]


def test_a_process_without_collections_stays_so():
    gc.disable()
    try:
        turns._without_collections(list)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_biases_have_an_end(server):
    reply = server.complete(prompt="a", logit_bias={str(i): 1 for i in range(MAX_WORDS + 1)})
    assert (reply.status, reply.error["param"]) == (400, "logit_bias")
    assert f"at most {MAX_WORDS} items" in reply.error["message"]


@pytest.mark.parametrize("field", ["prompt", "bad_words", "logit_bias"])
def test_texts_of_large_bodies_are_encoded_in_a_thread(server, llm, monkeypatch, field):
    words = [f"word {i}" for i in range(1000)]
    long = {"prompt": "a" * 9000, "bad_words": words, "logit_bias": dict.fromkeys(words, 1)}

    in_loop = noting(
        monkeypatch, llm.tokenizer, "encode", lambda *_: threading.current_thread() is server.thread
    )
    server.complete(**{"prompt": "Once", "max_tokens": 1, field: long[field]})
    assert in_loop
    assert not any(in_loop)


@pytest.mark.parametrize("form", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize("value", [[5.0, 6], [5, 6.0]])
def test_a_whole_number_may_have_a_point_in_a_list_too(form, value):
    asked = {"stop_token_ids": value, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    found = form.model_validate({name: value for name, value in asked.items() if name in form.model_fields})
    assert found.stop_token_ids == [5, 6]
    with pytest.raises(ValidationError):
        form.model_validate(asked | {"stop_token_ids": [5.5]})


WORDS = [" the" * 400] * 4


@pytest.mark.parametrize(
    ("body", "field", "count"),
    [
        ({"prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs", 128 * 4 * 400 * 21),
        ({"logprobs": 20, "echo": True, "max_tokens": 0}, "logprobs", 128 * 4 * 400 * 21),
        ({"logprobs": 20, "max_tokens": 100, "stream": True}, "logprobs", 128 * 4 * 100 * 21),
    ],
)
def test_a_reply_of_too_many_log_probabilities_is_refused_before_any_work(server, llm, body, field, count):
    assert (
        server.complete(prompt="a", echo=True, logprobs=0).status == 200
    )  # computes what BOS predicts, once
    with llm.engine.wrapped(Gate) as gate:
        reply = server.complete(prompt=WORDS, n=128, **body)
        assert gate.num_asked == 0
    assert (reply.status, reply.error["param"]) == (400, field)
    assert f"{field} asks for {count} log" in reply.error["message"]
    assert f"at most {MAX_LOGPROBS} in" in reply.error["message"]


def test_the_samples_of_a_prompt_share_its_log_probabilities(server, monkeypatch):
    asked = noting(monkeypatch, replies, "described")
    reply = server.complete(
        prompt=[[1, 2, 3], [4, 5]], n=3, prompt_logprobs=1, max_tokens=1, temperature=0
    ).json
    assert len(asked) == 3 + 2
    found = [choice["prompt_logprobs"] for choice in reply["choices"]]
    assert [len(each) for each in found] == [3, 3, 3, 2, 2, 2]


MIXED = {
    "text": "a\n\u00e9",
    "lists": [[*range(100)], [], [None, -0.5]],
    "objects": [{"of": {"lists": [1]}}] * 70,
    "no": {},
}


MANY_WORDS = " the" * 300


def test_json_in_parts_is_json():
    assert "".join(json_parts(MIXED)) == to_json(MIXED)
    for items in ([], [MIXED], [MIXED] * 3):
        assert "".join(json_parts({"a": 1, "b": (each for each in items)})) == to_json({"a": 1, "b": items})


def test_a_reply_is_in_memory_once(monkeypatch):
    monkeypatch.setattr(turns, "SLICE_SECONDS", -1.0)
    tracemalloc.start()
    try:
        size = len(asyncio.run(whole("x" * 100_000 for _ in range(100))))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 10_000_000
    assert most < 1.3 * size


def size_of(value, seen):
    """Bytes of lists, dicts and numbers, each of which counts once."""
    if value is None or id(value) in seen:
        return 0
    seen.add(id(value))
    parts = value if isinstance(value, list) else ()
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else parts
    return sys.getsizeof(value) + sum(size_of(part, seen) for part in parts)


@pytest.mark.parametrize("count", [0, 1, 5, 10, 20])
@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        ("/v1/completions", ["prompt_logprobs"], {"prompt": MANY_WORDS, "max_tokens": 1, "n": 3}),
        ("/v1/completions", ["logprobs"], {"prompt": MANY_WORDS, "echo": True, "max_tokens": 0}),
        ("/v1/completions", ["logprobs"], {"prompt": "a", "max_tokens": 300, "ignore_eos": True}),
        ("/generate", ["logprobs", "prompt_logprobs"], {"prompt": MANY_WORDS, "max_tokens": 100}),
    ],
)
def test_log_probabilities_count_as_they_are(server, llm, monkeypatch, path, fields, asked, count):
    """As values and as JSON: both are there while a reply is written."""
    jobs = noting(monkeypatch, Api, "_reply_bytes", lambda api, job: job)
    reply = server.ask(path, asked | dict.fromkeys(fields, count))
    assert reply.status == 200
    [job] = jobs
    outputs = llm.generate(job.prompts, job.params)
    values = [[output.prompt_logprobs, *map(attrgetter("logprobs"), output.outputs)] for output in outputs]
    assert size_of(values, set()) + len(reply.body) <= server.api._reply_bytes(job)


def test_the_loop_turns_between_the_parts_of_replies(monkeypatch):
    monkeypatch.setattr(turns, "SLICE_SECONDS", -1.0)
    order = []

    def parts(name):
        for _ in range(3):
            order.append(name)
            yield name

    async def write_both():
        await asyncio.gather(whole(parts("a")), whole(parts("b")))

    asyncio.run(write_both())
    assert order == [*"ababab"]


OF_PROMPT = {"prompt": MANY_WORDS, "prompt_logprobs": 5, "max_tokens": 1, "n": 7}
ECHOED = {"prompt": MANY_WORDS, "logprobs": 5, "echo": True, "max_tokens": 0, "n": 7}
OF_TOKENS = {"prompt": "a", "logprobs": 5, "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("/v1/completions", body | {"stream": streams})
            for body in (OF_PROMPT, ECHOED)
            for streams in (False, True)
        ),
        ("/v1/completions", OF_TOKENS),
        *(("/generate", OF_TOKENS | {"stream": streams}) for streams in (False, True)),
        ("/v1/embeddings", {"input": ["Once", "upon", "a", "time"] * 4}),
        ("/tokenize", {"prompt": MANY_WORDS, "return_token_strs": True}),
        ("/score_continuations", {"prompt": "Once", "continuations": ["a", MANY_WORDS]}),
    ],
)
def test_large_replies_are_written_in_parts(server, monkeypatch, path, body):
    monkeypatch.setattr(turns, "SLICE_SECONDS", -1.0)
    in_slices, sizes = turns.in_slices, []

    async def noted(parts):
        async for part in in_slices(parts):
            sizes.append(len(part))
            yield part

    for module in (turns, api):
        monkeypatch.setattr(module, "in_slices", noted)
    assert server.ask(path, body).status == 200
    assert 5 * max(sizes) < sum(sizes)


ALL_TOKENS = {"prompt": "a", "logprobs": 5, "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "body", [ALL_TOKENS, {"prompt": "a" * 1000, "max_tokens": 1, "overflow": "truncate"}]
)
def test_requests_have_a_bound_together(server, llm, monkeypatch, streams, body):
    """Each that runs, or is not read, counts with the most bytes that it can have."""
    monkeypatch.setattr(turns, "MAX_HELD", 10_000)
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin(**body, stream=streams)
        gate.wait_until_asked(1)
        reply = server.complete(**body)
        assert (reply.status, reply.error["code"]) == (429, "memory_full")
        client.close()
        gate.allow(2)
        until(lambda: not server.api.turns.held_bytes)
        gate.allow(300)
        assert server.complete(**body).status == 200


def test_a_reply_that_is_not_read_holds_up_others(server, monkeypatch):
    monkeypatch.setattr(turns, "MAX_HELD", 5_000_000)
    client = server.begin("/tokenize", prompt="word " * 400_000, return_token_strs=True)
    until(lambda: server.api.turns.held_bytes > 5_000_000)
    reply = server.complete(prompt="a", max_tokens=1)
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "memory_full", "1")
    assert server.ask("/health").status == 200
    client.close()
    until(lambda: not server.api.turns.held_bytes)
    assert server.complete(prompt="a", max_tokens=1).status == 200
