"""Clients of OpenAI's API, with the code of their own pages, next to `tinygpt serve` with its default flags.

`pip install -e ".[serve,guided]"`, then some of openai huggingface_hub "pydantic-ai-slim[openai]" langchain-openai
litellm instructor llama-index-llms-openai-like dspy, and `python scripts/clients.py [URL]`; without a URL it serves
the demo. More of OpenAI's own client is in tests/server/test_openai_client.py.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel

from tinygpt.bench.sweep import served

PROMPT = "Once upon a time"
USER = {"role": "user", "content": PROMPT}
Calls = dict[str, Callable[[], Any]]


class Animal(BaseModel):
    kind: Literal["fox", "wolf", "cat"]


def look(kind: str) -> str:
    """Look at an animal."""
    return f"I see a {kind}."


SCHEMA = Animal.model_json_schema()
TOOL = {"type": "function", "function": {"name": "look", "description": look.__doc__, "parameters": SCHEMA}}


def openai(url: str) -> Calls:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    chat = client.chat.completions
    asked: Any = {"model": "demo", "messages": [USER]}
    return {
        "tools": lambda: chat.create(**asked, tools=[TOOL]).choices[0].message.content,
        "parse": lambda: chat.parse(**asked, response_format=Animal).choices[0].message.parsed,
        "responses": lambda: client.responses.create(model="demo", input=PROMPT).output_text,
    }


def huggingface_hub(url: str) -> Calls:
    """Ask without a model's name."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=url)

    def chat(**asked: Any) -> str:
        return client.chat_completion([USER], **asked).choices[0].message.content

    def animal(**form: Any) -> Animal:
        return Animal.model_validate_json(chat(response_format=form))

    return {
        "chat": chat,
        "tools": lambda: chat(tools=[TOOL], tool_choice="auto"),
        "json": lambda: animal(type="json", value=SCHEMA),
        "json_object": lambda: animal(type="json_object", value=SCHEMA),
        "json_schema": lambda: animal(type="json_schema", json_schema={"name": "animal", "schema": SCHEMA}),
    }


def pydantic_ai(url: str) -> Calls:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    with_tool = Agent(model)
    with_tool.tool_plain(look)
    return {
        "text": lambda: Agent(model).run_sync(PROMPT).output,
        "output_type": lambda: Agent(model, output_type=Animal).run_sync(PROMPT).output,
        "tool_plain": lambda: with_tool.run_sync(PROMPT).output,
    }


def langchain(url: str) -> Calls:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model="demo")
    return {
        "turns": lambda: chat.invoke([USER, chat.invoke(PROMPT), USER]).content,
        "bind_tools": lambda: chat.bind_tools([look]).invoke(PROMPT).content,
        "function_calling": lambda: chat.with_structured_output(Animal, method="function_calling").invoke(
            PROMPT
        ),
        "json_schema": lambda: chat.with_structured_output(Animal).invoke(PROMPT),
    }


def litellm(url: str) -> Calls:
    """Go on after the dump of a reply, too."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network
    from litellm import completion

    def reply(*messages: Any, **asked: Any) -> Any:
        asked |= {"model": "openai/demo", "api_base": url, "api_key": "none"}
        return completion(messages=[USER, *messages], **asked).choices[0].message

    return {
        "turns": lambda: reply(reply().model_dump(), USER).content,
        "tools": lambda: reply(tools=[TOOL]).content,
    }


def instructor(url: str) -> Calls:
    import instructor
    import openai

    server = openai.OpenAI(base_url=url, api_key="none")

    def animal(mode: str) -> Animal:
        client = instructor.from_openai(server, mode=instructor.Mode[mode])
        return client.chat.completions.create(model="demo", messages=[USER], response_model=Animal)

    return {
        "TOOLS": lambda: animal("TOOLS"),
        "JSON_SCHEMA": lambda: animal("JSON_SCHEMA"),
    }


def llama_index(url: str) -> Calls:
    from llama_index.llms.openai_like import OpenAILike

    client = OpenAILike(model="demo", api_base=url, api_key="none", is_chat_model=True)
    return {"complete": lambda: client.complete(PROMPT).text}


def dspy(url: str) -> Calls:
    import dspy

    return {"LM": lambda: dspy.LM("openai/demo", api_base=url, api_key="none")(PROMPT)[0]}


CLIENTS = {
    "openai": openai,
    "huggingface_hub": huggingface_hub,
    "pydantic-ai-slim": pydantic_ai,
    "langchain-openai": langchain,
    "litellm": litellm,
    "instructor": instructor,
    "llama-index-llms-openai-like": llama_index,
    "dspy": dspy,
}


def told(call: Callable[[], Any]) -> str:
    """Return what a call gave: a text or an animal, or what it raised."""
    try:
        answer = call()
        assert isinstance(answer, Animal) or answer.strip()
    except Exception as error:  # each is a row
        return f"FAILED, {type(error).__name__}: {error}"
    return f"worked, {answer!r}"


def main(url: str = "") -> int:
    """Print a row for each call, and return 1 if one of an installed client failed."""
    has_failed = False
    with ExitStack() as stack:
        url = url or stack.enter_context(served("demo", "float32", {}))[0] + "/v1"
        for package, client in CLIENTS.items():
            try:
                number = version(package)
            except PackageNotFoundError:
                print(f"{package}: not installed")
                continue
            for name, call in client(url).items():
                row = told(call)
                has_failed |= row.startswith("FAILED")
                print(f"{package} {number} {name}: {row:.90}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
