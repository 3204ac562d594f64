"""The plain form of OpenAI's Responses: one text as the output, whole and as events."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from ..outputs import RequestOutput
from .completions import Job
from .replies import PromptChunk, event, json_parts, usage

OF_TEXT = {"output_index": 0, "content_index": 0}
ALWAYS = {"error": None, "parallel_tool_calls": False, "previous_response_id": None, "store": False}
ALWAYS |= {"text": {"format": {"type": "text"}}, "tool_choice": "none", "tools": [], "truncation": "disabled"}
COUNTS = {"prompt": "input", "completion": "output", "total": "total"}  # OpenAI's two words for one count


class Responses(Job):
    done = ""  # the last event is a response's end

    def __post_init__(self):
        super().__post_init__()
        self._numbers, self._item_id = count(), self.head["id"].replace("resp", "msg")

    def reply(self, outputs: list[RequestOutput]) -> Iterator[str]:
        return json_parts(self._ended(outputs))

    def begin(self) -> str:
        started = self._response("in_progress", [])
        told = self._told("created", response=started) + self._told("in_progress", response=started)
        told += self._told("output_item.added", output_index=0, item=self._item("in_progress", []))
        return told + self._told("content_part.added", **self._of_item(), part=_part(""))

    def write(self, chunks: list[PromptChunk]) -> Iterator[str]:
        texts = (chunk.text for _, chunk in chunks if chunk.text)
        return (self._told("output_text.delta", **self._of_item(), delta=text, logprobs=[]) for text in texts)

    def end(self, outputs: list[RequestOutput]) -> Iterator[str]:
        ended = self._ended(outputs)
        text = outputs[0].outputs[0].text or ""
        yield self._told("output_text.done", **self._of_item(), text=text, logprobs=[])
        yield self._told("content_part.done", **self._of_item(), part=_part(text))
        yield self._told("output_item.done", output_index=0, item=ended["output"][0])
        yield self._told(ended["status"], response=ended)

    def _ended(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [sample] = outputs[0].outputs
        status = "incomplete" if sample.finish_reason == "length" else "completed"
        return self._response(status, [self._item(status, [_part(sample.text or "")])], outputs)

    def _response(
        self, status: str, items: list, outputs: list[RequestOutput] | None = None
    ) -> dict[str, Any]:
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.form.instructions,
            "max_output_tokens": self.form.max_tokens,
            "metadata": self.form.metadata or {},
            "model": self.head["model"],
            "output": items,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "usage": outputs and _counts(outputs),
            **ALWAYS,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _of_item(self) -> dict[str, Any]:
        return {"item_id": self._item_id, **OF_TEXT}

    def _told(self, name: str, **fields: Any) -> str:
        kind = f"response.{name}"
        return f"event: {kind}\n" + event({"type": kind, "sequence_number": next(self._numbers), **fields})


def _counts(outputs: list[RequestOutput]) -> dict[str, Any]:
    found = usage(outputs)
    counts = {f"{name}_tokens": found[f"{other}_tokens"] for other, name in COUNTS.items()}
    details = {
        "input_tokens_details": found["prompt_tokens_details"],
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return counts | details


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
