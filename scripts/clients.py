"""Clients of OpenAI's API and the demo in a server with its default flags: one call of each, and what it must give.

`pip install openai litellm instructor langchain-openai llama-index-llms-openai-like`, `tinygpt serve` in another shell,
then `python scripts/clients.py [URL]`. A client that is not installed is passed over.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

MODEL = "demo"
PROMPT = "Once upon a time"
TALK = [{"role": "user", "content": PROMPT}]
LIMIT = {"model": MODEL, "max_tokens": 40}


class Animal(BaseModel):
    """An animal of the tale."""

    kind: Literal["fox", "wolf", "cat"]


def is_animal(found: Any) -> bool:
    return isinstance(found, Animal)


def is_text(found: Any) -> bool:
    return isinstance(found, str) and len(found) > 3


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def conversation(url: str) -> str:
    chat = openai_client(url).chat.completions
    first = chat.create(messages=TALK, store=True, reasoning_effort="low", **LIMIT).choices[0].message
    return chat.create(messages=[*TALK, first, *TALK], **LIMIT).choices[0].message.content


def streamed_tool(url: str) -> Animal:
    import openai

    tools = [openai.pydantic_function_tool(Animal)]
    chat = openai_client(url).chat.completions
    with chat.stream(messages=TALK, tools=tools, tool_choice="required", **LIMIT) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    return call.function.parsed_arguments


def responses_parse(url: str) -> Animal:
    client = openai_client(url).responses
    return client.parse(model=MODEL, input=PROMPT, text_format=Animal, max_output_tokens=40).output_parsed


def async_stream(url: str) -> str:
    import openai

    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = await client.chat.completions.create(messages=TALK, stream=True, **LIMIT)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return asyncio.run(main())


def litellm_chat(url: str) -> str:
    import litellm

    asked = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 40}
    first = litellm.completion(messages=TALK, **asked).choices[0].message
    return litellm.completion(messages=[*TALK, first.model_dump(), *TALK], **asked).choices[0].message.content


def instructor_in(mode: str) -> Callable[[str], Animal]:
    def call(url: str) -> Animal:
        import instructor

        client = instructor.from_openai(openai_client(url), mode=instructor.Mode[mode])
        return client.chat.completions.create(messages=TALK, response_model=Animal, max_retries=0, **LIMIT)

    return call


def langchain(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_tokens=40)


def langchain_turns(url: str) -> str:
    first = langchain(url).invoke([("user", PROMPT)])
    return langchain(url).invoke([("user", PROMPT), first, ("user", PROMPT)]).content


def langchain_structured(method: str) -> Callable[[str], Animal]:
    return lambda url: langchain(url).with_structured_output(Animal, method=method).invoke(PROMPT)


def llama_index(url: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(model=MODEL, api_base=url, api_key="none", is_chat_model=True, max_tokens=40)


CALLS: dict[str, dict[str, tuple[Callable[[str], Any], Callable[[Any], bool]]]] = {
    "openai": {
        "a conversation with its own replies": (conversation, is_text),
        "an async stream": (async_stream, is_text),
        "a tool, streamed": (streamed_tool, is_animal),
        "responses.parse": (responses_parse, is_animal),
    },
    "litellm": {"a conversation with dumps of replies": (litellm_chat, is_text)},
    "instructor": {mode: (instructor_in(mode), is_animal) for mode in ("TOOLS", "JSON_SCHEMA")},
    "langchain-openai": {
        "a conversation with its own replies": (langchain_turns, is_text),
        **{
            method: (langchain_structured(method), is_animal)
            for method in ("function_calling", "json_schema")
        },
    },
    "llama-index-llms-openai-like": {
        "complete": (lambda url: llama_index(url).complete(PROMPT).text, is_text)
    },
}


def main(url: str = "http://127.0.0.1:8000/v1") -> int:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network
    failed = 0
    for package, calls in CALLS.items():
        for name, (call, is_right) in calls.items():
            try:
                found = call(url)
                told = f"{'ok' if is_right(found) else 'WRONG'}: {json.dumps(str(found))[:80]}"
            except ImportError as error:
                told = f"not tried: {error}"
            except Exception as error:  # of any client
                told = f"WRONG: {error!r}"
            failed += told.startswith("WRONG")
            release = "" if told.startswith("not tried") else version(package)
            print(f"{package} {release}, {name}: {told}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
