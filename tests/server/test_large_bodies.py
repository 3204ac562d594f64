"""Bodies of megabytes: at most a few errors are looked for, and long texts are encoded in a thread."""

import threading

import pytest
from pydantic import ValidationError

from tinygpt.server.protocol import MAX_IDS, MAX_WORDS, ChatRequest, CompletionRequest

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


@pytest.mark.parametrize(
    "body",
    [
        {"bad_words": ["a"] * (MAX_WORDS + 1)},
        {"bad_words_ids": [[1]] * (MAX_WORDS + 1)},
        {"prompt": [1] * (MAX_IDS + 1)},
        {"suppress_tokens": [1] * (MAX_IDS + 1)},
    ],
    ids=lambda body: next(iter(body)),
)
def test_lists_have_an_end(server, body):
    reply = server.complete(**body)
    assert (reply.status, reply.error["param"]) == (400, next(iter(body)))


@pytest.mark.parametrize("field", ["prompt", "bad_words", "logit_bias", "suffix"])
def test_texts_of_large_bodies_are_encoded_in_a_thread(server, llm, monkeypatch, field):
    words, in_loop, encode = [f"word {i}" for i in range(1000)], [], llm.tokenizer.encode
    long = {"prompt": "a" * 9000, "bad_words": words, "logit_bias": dict.fromkeys(words, 1), "suffix": "a" * 9000}

    def noted(*arguments):
        in_loop.append(threading.current_thread() is server.thread)
        return encode(*arguments)

    monkeypatch.setattr(llm.tokenizer, "encode", noted)
    server.complete(**{"prompt": "Once", "max_tokens": 1, "best_of": 2, field: long[field]})
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
