"""Bodies of megabytes, right or wrong: the event loop does none of the work for them, and no more than one error is
looked for."""

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")

import json
import threading

from pydantic import ValidationError

from tinygpt.server.protocol.chat import ChatRequest
from tinygpt.server.protocol.completions import CompletionRequest
from tinygpt.server.protocol.fields import MAX_TOKENS
from tinygpt.server.protocol.sampling import MAX_WORDS
from tinygpt.server.transport import endpoint

MANY = 5000
FEW = 8  # errors: one for each type that a field may have, and for each part of an object
WRONG = {
    "nulls": {"prompt": [None] * MANY},
    "objects": {"prompt": [{}] * MANY},
    "lists of nulls": {"prompt": [[None] * MANY] * 9},
    "ids that are none": {"stop_token_ids": [-1] * MANY, "suppress_tokens": ["a"] * MANY},
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
def test_of_many_errors_the_first_is_looked_for(name):
    form, body = (CompletionRequest, WRONG[name]) if name in WRONG else (ChatRequest, WRONG_CHATS[name])
    with pytest.raises(ValidationError) as found:
        form.model_validate(body)
    assert found.value.error_count() <= FEW


@pytest.mark.parametrize(
    "body",
    [
        {"bad_words": ["a"] * (MAX_WORDS + 1)},
        {"bad_words_ids": [[1]] * (MAX_WORDS + 1)},
        {"prompt": [1] * (MAX_TOKENS + 1)},
        {"suppress_tokens": [1] * (MAX_TOKENS + 1)},
    ],
    ids=lambda body: next(iter(body)),
)
def test_lists_have_an_end(server, body):
    reply = server.complete(**body)
    assert (reply.status, reply.error["param"]) == (400, next(iter(body)))


class Threads:
    """In which threads a function is called, whether this is the event loop's, and how often."""

    def __init__(self, function, loop):
        self._function, self._loop, self.in_loop = function, loop, []

    def __call__(self, *arguments, **options):
        self.in_loop.append(threading.current_thread() is self._loop)
        return self._function(*arguments, **options)


LARGE = {
    "right": {"prompt": "a", "user": "u" * 9000},
    "wrong": {"prompt": [None] * MANY},
    "no JSON": b"[" * 9000,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_is_read_beside_the_loop(server, monkeypatch, name):
    read = Threads(endpoint.read_form, server.thread)
    monkeypatch.setattr(endpoint, "read_form", read)
    body = LARGE[name] if name == "no JSON" else json.dumps({"max_tokens": 1, **LARGE[name]}).encode()
    assert server.ask("/v1/completions", body).status == (200 if name == "right" else 400)
    assert read.in_loop == [False]
    assert server.complete(prompt="a", max_tokens=1).status == 200
    assert read.in_loop == [False, True]  # a small one is not worth a thread


@pytest.mark.parametrize("field", ["bad_words", "logit_bias", "suffix"])
def test_texts_of_large_fields_are_encoded_beside_the_loop(server, llm, monkeypatch, field):
    words = [f"word {i}" for i in range(1000)]
    value = {
        "bad_words": words,
        "logit_bias": dict.fromkeys(words, 1),
        "suffix": "a" * 9000,
    }[field]
    encode = Threads(llm.tokenizer.encode, server.thread)
    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    server.complete(prompt="Once", max_tokens=1, best_of=2, **{field: value})
    assert encode.in_loop[1:].count(True) == 0  # beside the prompt's, which is short


@pytest.mark.parametrize("form", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize("value", [[5.0, 6], [5, 6.0]])
def test_a_whole_number_may_have_a_point_in_a_list_too(form, value):
    asked = {"stop_token_ids": value, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    found = form.model_validate({name: value for name, value in asked.items() if name in form.model_fields})
    assert found.stop_token_ids == [5, 6]
    with pytest.raises(ValidationError):
        form.model_validate(asked | {"stop_token_ids": [5.5]})
