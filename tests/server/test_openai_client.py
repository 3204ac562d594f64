"""OpenAI's own client takes the server for the real thing."""

import pytest

pytest.importorskip("openai", reason="openai, of the extra `parity`, is not installed")

import asyncio
import os
import subprocess
import sys
from typing import Literal

import openai
from pydantic import BaseModel

from support.engines import sample_of
from support.gate import Gate, until_idle
from support.serving import served, until
from tinygpt import LLM
from tinygpt.text.chat import PlainTemplate
from tinygpt.text.chat_template import ChatTemplate


class Color(BaseModel):
    name: Literal["red", "blue"]


ASKED = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.8, "seed": 4}
# A folder with openai-python's source, whose own tests then run: its tests/api_resources.
CHECKOUT = os.environ.get("OPENAI_PYTHON")
SERVED_BY_ITS_TESTS = ("gpt-3.5-turbo-instruct", "gpt-4o-mini", "gpt-6-astra")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def expected(llm):
    return sample_of(llm, ASKED["prompt"], max_tokens=8, temperature=0.8, seed=4).text


def with_async_client(server, main):
    async def run():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            return await main(client)

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_plain_and_streamed(client, expected):
    completion = client.completions.create(**ASKED, logprobs=2)
    assert completion.choices[0].text == expected
    assert completion.usage.completion_tokens == 8
    again = client.completions.create(**ASKED | {"prompt": [5] * 40})
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    again = client.completions.create(**ASKED | {"prompt": [5] * 40})
    assert again.usage.prompt_tokens_details.cached_tokens == 39
    assert len(completion.choices[0].logprobs.tokens) == 8
    with client.completions.create(**ASKED, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_async_plain_and_streamed(server, expected):
    async def main(client):
        completion = await client.completions.create(**ASKED)
        stream = await client.completions.create(**ASKED, stream=True)
        return completion.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    assert with_async_client(server, main) == (expected, expected)


def test_cancelling_frees_the_slot(server, llm):
    server.forget()
    with llm.engine.wrapped(Gate) as gate:

        async def main(client):
            asked = {**ASKED, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(**asked, stream=True)
            gate.allow(3)
            async for _ in stream:
                break
            await stream.close()
            plain = asyncio.ensure_future(client.completions.create(**asked))
            await asyncio.to_thread(
                until, lambda: llm.engine.scheduler.running or llm.engine.scheduler.waiting
            )
            plain.cancel()
            await asyncio.wait([plain])

        with_async_client(server, main)
        assert server.ended()["status"] == 499
        gate.allow(1)
        until_idle(llm)


def test_errors_are_its_exceptions(server, client):
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(**ASKED | {"max_tokens": 5000})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**ASKED | {"model": "gpt-5"})
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(openai.BadRequestError, match="'g', which is not among tools"):
        client.chat.completions.create(**asked, tools=tools, tool_choice=choice)


def test_errors_within_a_stream_are_its_exceptions(llm):
    with served(llm, drain_seconds=0.05) as server, llm.engine.wrapped(Gate) as gate:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            gate.allow(2)
            stream = client.completions.create(**ASKED, stream=True)
            next(stream)
            server.terminate()
            with pytest.raises(openai.APIError, match="shut down"):
                list(stream)
        gate.allow(1)


def test_models_and_embeddings(client, llm):
    assert [model.id for model in client.models.list()] == ["demo", "other/name"]
    assert client.models.retrieve("other/name").id == "other/name"
    found = client.embeddings.create(model="demo", input=["a wolf"])  # asks for base64 and decodes it
    assert found.data[0].embedding == llm.embed("a wolf")[0].tolist()


def test_chat(llm):
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    text = sample_of(llm, "Once upon a time", max_tokens=6).text
    messages = [{"role": "user", "content": "Once upon a time"}]
    asked = {"model": "demo", "messages": messages, "max_completion_tokens": 6, "temperature": 0}
    with (
        served(llm, chat_template=template) as server,
        openai.OpenAI(base_url=server.url, api_key="none") as client,
    ):
        assert client.chat.completions.create(**asked).choices[0].message.content == text
        with client.chat.completions.create(**asked, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content for chunk in stream) == text


def test_a_conversation_goes_on_with_the_replies_message(client):
    talk = [{"role": "user", "content": "Once upon a time"}]
    asked = {"model": "demo", "max_tokens": 4}
    for form in ("itself", "dump"):
        message = client.chat.completions.create(messages=talk, **asked).choices[0].message
        talk += [message if form == "itself" else message.model_dump(), talk[0]]
    tools = [openai.pydantic_function_tool(Color)]
    asked |= {"max_tokens": 60, "tools": tools, "tool_choice": "required"}
    with client.chat.completions.stream(messages=talk, **asked) as stream:
        called = stream.get_final_completion().choices[0].message
    assert called.tool_calls[0].function.parsed_arguments.name in ("red", "blue")
    found = client.responses.parse(model="demo", input="Once", text_format=Color, max_output_tokens=60)
    assert found.output_parsed.name in ("red", "blue")
    given = [*found.output, {"role": "user", "content": "and"}]
    assert client.responses.create(model="demo", input=given, max_output_tokens=4).output_text
    del asked["tools"], asked["tool_choice"]
    parsed = client.chat.completions.parse(messages=talk, response_format=Color, **asked).choices[0].message
    answer = {"role": "tool", "content": "done", "tool_call_id": called.tool_calls[0].id}
    talk += [parsed, talk[0], called, answer]
    assert client.chat.completions.create(messages=talk, model="demo", max_tokens=4).choices


def test_responses(llm):
    text = sample_of(llm, "Once upon a time", max_tokens=6).text
    asked = {"model": "demo", "input": "Once upon a time", "max_output_tokens": 6, "temperature": 0}
    with served(llm, chat_template=PlainTemplate()) as server:
        with openai.OpenAI(base_url=server.url, api_key="none") as client:
            assert client.responses.create(**asked).output_text == text
            with client.responses.create(**asked, stream=True) as stream:
                events = list(stream)
            ended = asked | {"extra_body": {"stop_token_ids": [*range(400)], "ignore_eos": True}}
            with client.responses.stream(**ended | {"max_output_tokens": 400}) as stream:
                assert stream.get_final_response().status == "completed"

        async def main(client):
            return (await client.responses.create(**asked)).output_text

        assert with_async_client(server, main) == text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert (events[-1].type, events[-1].response.usage.output_tokens) == ("response.incomplete", 6)


@pytest.mark.skipif(not CHECKOUT, reason="OPENAI_PYTHON names no folder with openai-python's source")
def test_its_own_tests_pass():
    files = [f"tests/api_resources/test_{name}.py" for name in ("completions", "models")]
    with LLM("demo") as llm, served(llm, served_model_names=SERVED_BY_ITS_TESTS) as server:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *files]
        environment = {**os.environ, "TEST_API_BASE_URL": server.url, "PYTHONPATH": ""}
        result = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    last = result.stdout.strip().splitlines()[-1]
    assert result.returncode == 0, result.stdout[-2000:]
    assert " passed" in last
    assert "skipped" not in last
