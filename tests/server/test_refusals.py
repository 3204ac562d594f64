"""What is not possible is refused before any work, in OpenAI's shape, with the name of the field."""

import http.client
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.gate import Gate
from support.serving import served, until
from tinygpt import LLM, SamplingParams

# A body, to which a prompt is added, and the field that the refusal names.
BODIES = {
    "unknown field": (b'{"foo": 1}', "foo"),
    "unknown field inside": (b'{"stream_options": {"x": 1}}', "stream_options"),
    "two names of one thing": (b'{"n_predict": 3, "max_tokens": 3}', "n_predict"),
    "two other names of one thing": (b'{"n_predict": 3, "max_new_tokens": 3}', "n_predict"),
    "a setting of another program": (b'{"compile": true}', "compile"),
    "an unknown field with a long name": (b'{"' + b"a" * 5000 + b'": 1}', "a" * 100 + "..."),
    "a wrong type inside": (b'{"stream_options": {"include_usage": 1}}', "stream_options"),
    "no object of any kind": (b'{"response_format": 5}', "response_format"),
    "a bias that is none": (b'{"logit_bias": {"7": "a"}}', "logit_bias"),
    "text for a number": (b'{"n": "3"}', "n"),
    "true for a number": (b'{"n": true}', "n"),
    "a broken number": (b'{"n": 1.5}', "n"),
    "NaN": (b'{"temperature": NaN}', "temperature"),
    "infinity": (b'{"top_p": Infinity}', "top_p"),
    "too cold": (b'{"temperature": -1}', "temperature"),
    "one of a list": (b'{"stop": ["a", 5]}', "stop"),
    "a text for a list": (b'{"stop_token_ids": "aaa"}', "stop_token_ids"),
    "no prompt": (b'{"max_tokens": 1}', "prompt"),
    "a list of all kinds": (b'{"prompt": [1, "a"]}', "prompt"),
    "an empty list": (b'{"prompt": []}', "prompt"),
    "a number as prompt": (b'{"prompt": 5}', "prompt"),
    "an id outside": (b'{"prompt": [9999]}', "prompt"),
    "a negative id": (b'{"prompt": [-1]}', "prompt"),
    "an empty stop": (b'{"stop": ""}', "stop"),
    "a biased id outside": (b'{"logit_bias": {"9999": 1}}', "logit_bias"),
    "a biased id of 5000 digits": (b'{"logit_bias": {"' + b"1" * 5000 + b'": 1}}', "logit_bias"),
    "a large bias": (b'{"logit_bias": {"5": 101}}', "logit_bias"),
    "best_of below n": (b'{"best_of": 1, "n": 2}', "best_of"),
    "best_of in a stream": (b'{"best_of": 2, "stream": true}', "best_of"),
    "beams in a stream": (b'{"num_beams": 2, "temperature": 0, "stream": true}', "num_beams"),
    "vLLM's beams in a stream": (b'{"use_beam_search": true, "n": 2, "stream": true}', "use_beam_search"),
    "more beams than slots": (b'{"num_beams": 5}', "num_beams"),
    "vLLM's beams that draw": (b'{"use_beam_search": true, "n": 2, "temperature": 1}', "temperature"),
    "the shortest loop": (
        b'{"repetition_detection": {"max_pattern_size": 2, "min_count": 2, "min_pattern_size": 3}}',
        "repetition_detection",
    ),
    "a prompt that is not read whole": (
        b'{"prompt": [' + b"1," * 600 + b'1], "overflow": "truncate", "prompt_logprobs": 0}',
        "prompt_logprobs",
    ),
    "a prompt without room behind it": (
        b'{"prompt": [' + b"1," * 600 + b'1], "overflow": "clamp"}',
        "prompt",
    ),
    "many logprobs": (b'{"logprobs": 21}', "logprobs"),
    "many prompt_logprobs": (b'{"prompt_logprobs": 21}', "prompt_logprobs"),
    "an unknown soft prompt": (b'{"soft_prompt": "x"}', "soft_prompt"),
    "no JSON": (b"{", None),
    "nothing": (b"", None),
    "no object": (b'"a"', None),
    "half a character": (b'{"n": 1, "prompt": ["a", "\\ud800"]}', "prompt"),
    "half a character in a name": (b'{"\\ud800": 1}', None),
    "no UTF-8": (b'{"prompt": "\xff"}', None),
    "deep brackets": (b"[" * 100_000, None),
    "a number of 5000 digits": (b'{"seed": ' + b"1" * 5000 + b"}", None),
    "a seed of 65 bits": (b'{"seed": 18446744073709551616}', "seed"),
    "a suffix that does not fit": (
        b'{"max_tokens": 500, "best_of": 2, "suffix": "a b c d e f g h i j k"}',
        "suffix",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_with_its_field(server, llm, name):
    body, field = BODIES[name]
    if body.startswith(b'{"') and name != "no prompt" and b'"prompt"' not in body:
        body = b'{"prompt": "a", ' + body[1:]
    with llm.engine.wrapped(Gate) as gate:
        reply = server.ask("/v1/completions", body)
        assert gate.num_asked == 0
    assert reply.status == 400
    assert reply.error.keys() == {"message", "type", "param", "code"}
    assert (reply.error["param"], reply.error["type"]) == (field, "invalid_request_error")
    assert reply.headers["x-should-retry"] == "false"


def test_a_misspelled_field_or_path_gets_a_suggestion(server):
    assert "did you mean temperature?" in server.complete(prompt="a", tempreature=1).error["message"]
    assert "did you mean /v1/completions?" in server.ask("/v1/completion").error["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("", {"n_predict": 3, "max_tokens": 3}, "n_predict and max_tokens name one thing: give one of them."),
        ("", {"stop": 5}, "stop is 5: Input should be a valid string, or a valid list."),
        ("chat/", {"messages": [{"content": "a"}]}, "messages.0.role is required."),
    ],
)
def test_messages_say_what_was_given(server, path, body, message):
    given = body if path else {"prompt": "a", **body}
    assert server.ask(f"/v1/{path}completions", given).error["message"] == message


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/score_continuations"])
def test_a_prompt_may_be_null_and_must_be_there(server, path):
    more = {"continuations": ["a"]} if path == "/score_continuations" else {"max_tokens": 1}
    assert server.ask(path, {"prompt": None, **more}).status == 200
    assert server.ask(path, more).error["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param", "numbers"),
    [
        ({"prompt": [1] * 600}, "prompt", (601, 600, 1)),
        ({"prompt": [1] * 600, "max_tokens": 0}, "prompt", (600, 600, 0)),
        ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", (513, 500, 13)),
        ({"prompt": "", "max_tokens": 2**31 - 1}, "max_tokens", (2**31, 1, 2**31 - 1)),
    ],
)
def test_what_does_not_fit_is_told_with_the_numbers(server, body, param, numbers):
    error = server.complete(**body).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    asked = "has 512 tokens, and {} were asked for: {} in the prompt and {} to generate."
    assert asked.format(*numbers) in error["message"]


def test_a_soft_prompt_takes_positions_too(small_demo, tmp_path):
    with LLM(small_demo) as plain:
        vectors = np.zeros((7, plain.config.n_embd), np.float32)
    save_file({"prompt_embeddings": vectors}, tmp_path / "tale.safetensors")
    body = {"prompt": [1] * 500, "soft_prompt": "tale", "ignore_eos": True}
    with LLM(small_demo, soft_prompts={"tale": tmp_path / "tale.safetensors"}) as llm, served(llm) as server:
        assert server.complete(**body).json["usage"]["completion_tokens"] == 512 - 507
        error = server.complete(**body, max_tokens=6).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


def test_a_model_that_is_not_there(server):
    for reply in (server.complete(prompt="a", model="gpt-5"), server.ask("/v1/models/gpt-5")):
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert "demo, other/name" in reply.error["message"]


def test_paths_methods_and_types_that_are_not_there(server):
    reply = server.ask("/v1/completions", b"{}", content_type="text/plain")
    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")
    assert (server.ask("/frobnicate").status, server.ask("/frobnicate").error["type"]) == (
        404,
        "not_found_error",
    )
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
        futures = [llm.submit([1], SamplingParams(max_tokens=1))]
        for _ in range(2):  # the second prompt finds no room, and the first is cancelled
            assert server.complete(prompt=["a", "b"]).status == 429
        futures.append(llm.submit([1], SamplingParams(max_tokens=1)))
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
        monkeypatch.setattr(llm, "submit", lambda *_: 1 / 0)
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
    with served(llm, ignores_unknown_fields=True) as lenient:
        found = lenient.complete(**body, **unknown).json
        assert found["choices"] == server.complete(**body).json["choices"]
        for name in ("text for a number", "too cold", "no JSON", "no UTF-8"):
            expected = server.ask("/v1/completions", BODIES[name][0].replace(b"{", b'{"prompt": "a", ', 1))
            given = BODIES[name][0].replace(b"{", b'{"foo": 1, "prompt": "a", ', 1)
            reply = lenient.ask("/v1/completions", given)
            assert (reply.status, reply.error["param"]) == (400, expected.error["param"])
        assert lenient.complete(foo=1, max_tokens=1).error["param"] == "prompt"
