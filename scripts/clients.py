"""Clients of OpenAI's API next to `tinygpt serve` with its default flags: calls of each, and what they must give.

`pip install litellm instructor langchain-openai llama-index-llms-openai-like`, then `python scripts/clients.py [URL]`.
OpenAI's own client is in tests/server/test_openai_client.py.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

PROMPT = "Once upon a time"
TALK = [{"role": "user", "content": PROMPT}]


class Animal(BaseModel):
    kind: Literal["fox", "wolf", "cat"]


def litellm(url: str) -> str:
    """Go on after the dump of a reply."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network
    from litellm import completion

    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "max_tokens": 40}
    first = completion(messages=TALK, **asked).choices[0].message
    return completion(messages=[*TALK, first.model_dump(), *TALK], **asked).choices[0].message.content


def instructor(url: str, mode: str) -> Animal:
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])
    asked = {"model": "demo", "max_tokens": 40, "response_model": Animal, "max_retries": 0}
    return client.chat.completions.create(messages=TALK, **asked)


def langchain(url: str, method: Any) -> Any:
    """Go on after a reply, or return a value of a schema."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model="demo", max_tokens=40)
    if method == "messages":
        return chat.invoke([("user", PROMPT), chat.invoke(PROMPT), ("user", PROMPT)]).content
    return chat.with_structured_output(Animal, method=method).invoke(PROMPT)


def llama_index(url: str) -> str:
    from llama_index.llms.openai_like import OpenAILike

    client = OpenAILike(model="demo", api_base=url, api_key="none", is_chat_model=True, max_tokens=40)
    return client.complete(PROMPT).text


CALLS: tuple[tuple[str, Callable[..., Any], tuple[str, ...], type], ...] = (
    ("litellm", litellm, (), str),
    ("instructor", instructor, ("TOOLS",), Animal),
    ("instructor", instructor, ("JSON_SCHEMA",), Animal),
    ("langchain-openai", langchain, ("messages",), str),
    ("langchain-openai", langchain, ("function_calling",), Animal),
    ("langchain-openai", langchain, ("json_schema",), Animal),
    ("llama-index-llms-openai-like", llama_index, (), str),
)


def main(url: str = "http://127.0.0.1:8000/v1") -> int:
    wrong = 0
    for package, call, arguments, kind in CALLS:
        answer = call(url, *arguments)
        is_right = isinstance(answer, kind) and bool(str(answer).strip())
        wrong += not is_right
        print(
            f"{package} {version(package)} {' '.join(arguments)}: {'ok' if is_right else 'WRONG'}, {answer!r:.80}"
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
