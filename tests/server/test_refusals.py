"""What is not possible is refused before any work, in OpenAI's shape, with the name of the field."""

import http.client
import json
import re
from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.gate import Gate
from support.paths import ROOT
from support.serving import served, until
from tinygpt import LLM
from tinygpt.text.chat_template import ChatTemplate

TEMPLATE = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})


def refusals():
    """By server, path and body: the status, the field, the code and the sentence."""
    lines = iter((ROOT / "tests" / "data" / "server_refusals.txt").read_text("latin-1").splitlines())
    for line in lines:
        if line.startswith("["):
            server = line[1:-1]
        elif line.startswith("/"):
            path, _, body = line.partition(" ")
            yield pytest.param(server, path, body, next(lines).strip(), id=f"{path} {body[-60:]!a}")


@pytest.fixture(scope="module")
def servers(small_demo):
    limits = {"max_num_seqs": 4, "max_queue": 3, "max_capture_bytes": 40_000}
    more = {"look": True, "strict_tools": True, "control_vectors": {"happy": None}, "chat_template": TEMPLATE}
    with LLM(small_demo, split_special_tokens=True, **limits) as llm, ExitStack() as stack:
        yield {
            name: stack.enter_context(served(llm, **each)) for name, each in (("plain", {}), ("full", more))
        }


@pytest.mark.parametrize(("server", "path", "body", "expected"), [*refusals()])
def test_a_bad_request_is_refused_with_its_field(servers, server, path, body, expected):
    data = re.sub(r"<([^<>]+)\*(\d+)>", lambda found: found[1] * int(found[2]), body).encode("latin-1")
    with servers[server].api.llm.engine.wrapped(Gate) as gate:
        reply = servers[server].ask(path, data)
        assert gate.num_asked == 0
    error = reply.error
    told = f"{reply.status} {error['param'] or '-'} {error['code'] or '-'}: {error['message']}"
    assert told == expected
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("not_found_error" if reply.status == 404 else "invalid_request_error")
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/score_continuations"])
def test_a_prompt_may_be_null(server, path):
    more = {"continuations": ["a"]} if path == "/score_continuations" else {"max_tokens": 1}
    assert server.ask(path, {"prompt": None, **more}).status == 200


def test_a_soft_prompt_takes_positions_too(small_demo, tmp_path):
    with LLM(small_demo) as plain:
        vectors = np.zeros((7, plain.config.n_embd), np.float32)
    save_file({"prompt_embeddings": vectors}, tmp_path / "tale.safetensors")
    body = {"prompt": [1] * 500, "soft_prompt": "tale", "ignore_eos": True}
    with LLM(small_demo, soft_prompts={"tale": tmp_path / "tale.safetensors"}) as llm, served(llm) as server:
        assert server.complete(**body).json["usage"]["completion_tokens"] == 512 - 507
        error = server.complete(**body, max_tokens=6).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


def test_paths_methods_and_types_that_are_not_there(server):
    reply = server.ask("/v1/completions", b"{}", content_type="text/plain")
    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")
    for path, end in (
        ("/v1/models/gpt-5", "has demo, other/name."),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/v1/moderations", "Not Found"),
        ("/v1/audio/speech", "Not Found"),
    ):
        reply = server.ask(path)
        assert (reply.status, reply.error["type"]) == (404, "not_found_error")
        assert reply.error["message"].endswith(end)
    for path, allowed in (
        ("/v1/completions", {"POST"}),
        ("/health", {"GET"}),
        ("/v1/models/x", {"DELETE", "GET"}),
    ):
        reply = server.ask(path, method="PUT")
        assert (reply.status, {*reply.headers["allow"].split(", ")} - {"HEAD"}) == (405, allowed)


def test_too_large_a_body_is_refused_before_it_is_read(llm):
    """Of announced gigabytes none is sent, and a body of a few parts is stopped on its way."""
    with served(llm, max_body_bytes=100) as server:
        assert server.ask("/v1/completions", b"{", content_length="9000000000").status == 413
        assert server.complete(prompt="a" * 50, max_tokens=1).status == 200
        assert server.complete(prompt="a" * 101).status == 413
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request(
            "POST", "/v1/completions", iter([b"[" * 60] * 2), {"content-type": "application/json"}
        )
        assert connection.getresponse().status == 413
        connection.close()


def test_a_full_queue_says_when_to_come_again():
    with (
        LLM("demo", max_num_seqs=1, max_queue=1) as llm,
        served(llm) as server,
        llm.engine.wrapped(Gate) as gate,
    ):
        futures = [llm.submit([1], max_tokens=1)]
        for _ in range(2):  # the second prompt finds no room, and the first is cancelled
            assert server.complete(prompt=["a", "b"]).status == 429
        futures.append(llm.submit([1], max_tokens=1))
        reply = server.complete(prompt="a")
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert "x-should-retry" not in reply.headers
        assert (reply.error["type"], reply.error["code"]) == ("rate_limit_error", "queue_full")
        for max_tokens in (0, 1):
            reply = server.complete(prompt="a", max_tokens=max_tokens, stream=True)
            assert (reply.status, reply.headers.get("retry-after")) == (429, "1")
        gate.allow(100)
        assert [future.result(60).outputs[0].finish_reason for future in futures] == ["length", "length"]
        until(lambda: not llm.engine.scheduler.running)
        assert not llm.engine.scheduler.waiting
        # A request that never fits must not be tried again.
        assert server.complete(prompt=["a", "b", "c"], max_tokens=1).status == 400


def test_a_bug_is_an_internal_error_and_tells_nothing(llm, monkeypatch):
    with served(llm) as server:
        monkeypatch.setattr(llm, "_single_request", lambda *_: 1 / 0)
        reply = server.complete(prompt="secret", max_tokens=1)
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert b"ZeroDivision" not in reply.body
        assert server.ended()["status"] == 500


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("is_own", "says"), [(True, "leave no token to choose at position"), (False, "not finite")]
)
def test_a_request_that_fails_on_the_way(server, llm, monkeypatch, is_streamed, is_own, says):
    """By its own processors, or by the weights; the same error, whole or as the last event of a stream."""
    forbidding = {"allowed_token_ids": [5], "bad_words_ids": [[5]]}
    forward = llm.engine.runner.forward
    monkeypatch.setattr(
        llm.engine.runner, "forward", lambda *given: forward(*given) * np.float32(1 if is_own else "nan")
    )
    reply = server.complete(prompt="a", max_tokens=2, stream=is_streamed, **(forbidding if is_own else {}))
    error = json.loads(reply.body.split(b"\n\n")[-3][6:])["error"] if is_streamed else reply.error
    kind, status = ("invalid_request_error", 400) if is_own else ("server_error", 500)
    assert (reply.status, error["type"], error["param"]) == (200 if is_streamed else status, kind, None)
    assert says in error["message"]


def test_unknown_fields_may_be_ignored(llm, server):
    """Inside of others too; what is wrong otherwise is told as ever."""
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "logit_bias": {"5": -1}, "stop": ["x"]}
    unknown = {"foo": [1], "bar": None, "stream_options": {"include_usage": False, "x": 1}}
    with served(llm, unknown_fields="ignore") as lenient:
        found = lenient.complete(**body, **unknown).json
        assert found["choices"] == server.complete(**body).choices
        for wrong in (b'"n": "3"}', b'"temperature": -1}', b"", b'"prompt": "\xff"}'):
            expected = server.ask("/v1/completions", b'{"prompt": "a", ' + wrong)
            reply = lenient.ask("/v1/completions", b'{"foo": 1, "prompt": "a", ' + wrong)
            assert (reply.status, reply.error["param"]) == (400, expected.error["param"])
        assert lenient.complete(foo=1, max_tokens=1).error["param"] == "prompt"
