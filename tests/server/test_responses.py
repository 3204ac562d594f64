"""/v1/responses: OpenAI's Responses with a text as the output, whole and as events."""

import json

import pytest

from support.serving import served
from tinygpt import SamplingParams
from tinygpt.text.chat import PlainTemplate

ASKED = {"input": "Once upon a time", "max_output_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 4}
BEGINNING = ["created", "in_progress", "output_item.added", "content_part.added"]
END = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture(scope="module")
def respond(llm):
    with served(llm, chat_template=PlainTemplate()) as server:
        yield lambda **body: server.ask("/v1/responses", ASKED | body)


@pytest.fixture
def expected(llm):
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=4)
    return lambda prompt: llm.generate(prompt, params)[0]


def events_of(reply) -> list[dict]:
    *events, end = reply.body.decode().split("\n\n")
    assert end == ""
    pairs = [event.split("\n") for event in events]
    values = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {value['type']}" for value in values]
    return values


def test_a_text_is_answered(respond, expected):
    found = respond().json
    output = expected("Once upon a time")
    assert found["object"] == "response"
    assert found["id"].startswith("resp_")  # LangChain tells responses by it
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = found["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [
        {"type": "output_text", "text": output.outputs[0].text, "annotations": [], "logprobs": []}
    ]
    assert (found["temperature"], found["top_p"], found["max_output_tokens"]) == (0.8, 0.9, 8)
    assert found["usage"].pop("input_tokens_details")["cached_tokens"] in range(4)
    assert found["usage"] == {
        "input_tokens": 4,
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "n_predict"])
def test_other_names_of_max_output_tokens(llm, name):
    with served(llm, chat_template=PlainTemplate()) as server:
        reply = server.ask("/v1/responses", {"input": "Once", name: 3}).json
    assert (reply["max_output_tokens"], reply["usage"]["output_tokens"]) == (3, 3)


def test_messages_follow_the_instructions(respond, expected):
    """A message of an earlier response goes in as it came out."""
    [earlier] = respond().json["output"]
    part = {"type": "input_text", "text": "The dog"}
    messages = [{"role": "user", "content": "Hello"}, earlier, {"role": "user", "content": [part, part]}]
    found = respond(input=messages, instructions="Be brief.", metadata={"a": "b"}, store=True).json
    text = expected(f"Be brief.\nHello{earlier['content'][0]['text']}\nThe dogThe dog").outputs[0].text
    assert found["output"][0]["content"][0]["text"] == text
    assert (found["instructions"], found["metadata"], found["store"]) == ("Be brief.", {"a": "b"}, False)


def test_a_stream_is_the_reply_in_pieces(respond):
    whole = respond().json
    events = events_of(respond(stream=True))
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert names == [*BEGINNING, *["output_text.delta"] * len(deltas), *END, "incomplete"]
    assert len(deltas) > 1
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(deltas) == events[names.index("output_text.done")]["text"] == text
    last = events[-1]["response"]
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"], first["id"]) == (
        "in_progress",
        [],
        None,
        last["id"],
    )
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}


def test_a_text_that_ends_by_itself_is_completed(respond):
    found = respond(stop_token_ids=list(range(400)), max_output_tokens=400, stream=True)
    assert events_of(found)[-1]["type"] == "response.completed"
    assert respond(stop_token_ids=list(range(400)), max_output_tokens=400).json["status"] == "completed"
