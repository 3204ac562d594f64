"""Replies and streams of events: completions, and the outputs of a RemoteLLM's requests."""

import base64
import codecs
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..async_llm import AsyncRequests, IndexedChunk
from ..engine.prompts import Prompt
from ..errors import RequestError, TinyGPTError
from ..outputs import CompletionOutput, RequestOutput, StreamChunk
from ..sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer
from ..wire import chunk_to_json, output_to_json, record_to_json
from .protocol import StreamOptions
from .refusals import BUG, ApiError, error_body, from_engine, to_json
from .turns import Write, json_parts, while_connected

log = logging.getLogger("tinygpt.server")
SSE = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = ": ping\n\n"
PING_SECONDS = 15.0  # between comments of a stream, for proxies that close silent connections
LOWEST = -9999.0  # as OpenAI and vLLM write smaller log probabilities: JSON has no infinity
DONE = "data: [DONE]\n\n"
OBFUSCATED_SIZE = 64  # bytes
BYTES_OF_LOGPROB = 70  # at most, in JSON
BYTES_OF_VALUE = 100  # at most: an int and a float in a dict
BYTES_OF_VALUES = 232  # of the dict of a token
Logprobs = dict[int, float]
Made = CompletionOutput | StreamChunk


def event(value: dict[str, Any]) -> str:
    return f"data: {to_json(value)}\n\n"


def counted(num_read: int, num_made: int) -> dict[str, Any]:
    return {"prompt_tokens": num_read, "completion_tokens": num_made, "total_tokens": num_read + num_made}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_made = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return counted(num_read, num_made) | {"prompt_tokens_details": {"cached_tokens": num_cached}}


class TokenNames:
    """Names of tokens: the text, or the bytes of a partial character, or the id of a token without bytes."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self.has_tokenizer = tokenizer is not None
        self.name = lru_cache(maxsize=100_000)(self._name)

    def bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        try:
            return self._tokenizer.token_bytes(token_id)
        except RequestError:  # this tokenizer's tokens are characters
            return self._tokenizer.decode([token_id]).encode()

    def _name(self, token_id: int) -> str:
        token_bytes = self.bytes_of(token_id)
        if not token_bytes:
            return f"token_id:{token_id}"
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class CompletionLogprobs:
    """The lists of one choice of /v1/completions. Offsets continue from one chunk to the next."""

    def __init__(self, names: TokenNames, num_top: int, by_id: bool, with_ids: bool):
        """by_id: name tokens by their ids. with_ids: also list the ids of the most probable tokens."""
        self._names = names
        self._num_top = num_top
        self._with_ids = with_ids
        self._name = "token_id:{}".format if by_id else names.name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, tokens: Iterable[tuple[int, Logprobs | None]]) -> dict[str, list]:
        lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._with_ids:
            lists["top_token_ids"] = []
        for token_id, logprobs in tokens:
            top = logprobs and _best(logprobs, self._num_top, token_id)
            lists["tokens"].append(self._name(token_id))
            lists["token_logprobs"].append(logprobs and max(logprobs[token_id], LOWEST))
            lists["top_logprobs"].append(
                top and {self._name(i): max(value, LOWEST) for i, value in top.items()}
            )
            lists["text_offset"].append(self._offset)
            if self._with_ids:
                lists["top_token_ids"].append(top and {self._name(i): i for i in top})
            self._offset += len(self._decoder.decode(self._names.bytes_of(token_id)))
        return lists


def described(
    names: TokenNames, num_top: int, token_id: int, logprobs: Logprobs | None
) -> dict[str, Any] | None:
    """Return vLLM's entry of prompt_logprobs. The rank is known of the most probable tokens only."""
    if logprobs is None:
        return None
    ranks = {i: rank for rank, i in enumerate(list(logprobs)[:num_top], 1)}
    return {
        str(i): {"logprob": max(value, LOWEST), "rank": ranks.get(i), "decoded_token": names.name(i)}
        for i, value in _best(logprobs, num_top, token_id).items()
    }


def _best(logprobs: Logprobs, num_top: int, token_id: int) -> Logprobs:
    """Return the most probable tokens, then the token itself."""
    return dict(islice(logprobs.items(), num_top)) | {token_id: logprobs[token_id]}


def activations_to_json(activations: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return each array as little-endian float32 in base64, with its shape."""
    arrays = {}
    for name, array in activations.items():
        data = base64.b64encode(np.asarray(array, "<f4").tobytes()).decode()
        arrays[name] = {"dtype": "float32", "shape": [*array.shape], "data": data}
    return arrays


@dataclass
class Job:
    """A checked request. head: the beginning of each reply and event. done: the end of a stream.

    Events of a stream: `begin`, then `write` for chunks that come together, then `end`.
    """

    head: dict[str, Any]
    form: Any  # a model of `protocol`
    prompts: list[Prompt]
    params: SamplingParams
    names: TokenNames
    id_prefix = ""
    reply_object = ""
    event_object = ""
    done = DONE

    def __post_init__(self):
        form = self.form
        self._options = form.stream_options or StreamOptions()
        has_logprobs = form.logprobs is not None and form.logprobs is not False
        # Tokens without a text have events, too.
        self._tells_all = self._options.continuous_usage_stats or form.return_token_ids or has_logprobs
        self._num_read = sum(len(prompt.token_ids) for prompt in self.prompts)
        self._num_made = 0
        self._event_head = f'data: {to_json(self.head)[:-1]},"choices":['  # of each event

    @property
    def num_logprobs(self) -> int:
        """The most log probabilities that the reply can have."""
        params = self.params
        of_prompt, of_token = (0 if n is None else n + 1 for n in (params.prompt_logprobs, params.logprobs))
        num_made = len(self.prompts) * params.max_tokens
        return params.num_samples * (self._num_read * of_prompt + num_made * of_token)

    @property
    def logprob_bytes(self) -> int:
        """The most bytes of log probabilities: in JSON, and as values, which the samples of a prompt share."""
        params = self.params
        num_made = len(self.prompts) * params.num_samples * params.max_tokens
        size = BYTES_OF_LOGPROB * self.num_logprobs
        for count, num_tokens in ((params.prompt_logprobs, self._num_read), (params.logprobs, num_made)):
            if count is not None:
                size += num_tokens * (BYTES_OF_VALUES + BYTES_OF_VALUE * (count + 1))
        return size

    def choice(self, i: int, made: Made) -> dict[str, Any]:
        """i: index of the prompt. made: a whole sample, or one token of it."""
        raise NotImplementedError

    def end_of_choice(self, made: Made, token_ids: list[int]) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": made.finish_reason}
        if made.finish_reason is not None:
            end["stop_reason"] = made.stop_reason
        if made.activations is not None:
            end["activations"] = activations_to_json(made.activations)
        if self.form.return_token_ids:
            end["token_ids"] = token_ids
        return end

    def choices(self, outputs: list[RequestOutput]) -> Iterator[dict[str, Any]]:
        return (self.choice(i, sample) for i, output in enumerate(outputs) for sample in output.outputs)

    def record(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {**self.head, "choices": self.choices(outputs), "usage": usage(outputs)}

    def begin(self) -> str:
        return ""

    def write(self, chunks: list[IndexedChunk]) -> Iterator[str]:
        for i, chunk in chunks:
            self._num_made += chunk.token_id is not None
            choice = self.choice(i, chunk)
            # The text is empty for a part of a character.
            tells_prompt = choice.get("text") or "prompt_logprobs" in choice
            if chunk.text or chunk.finish_reason or self._tells_all or tells_prompt:
                yield self._event(choice)

    def _event(self, choice: dict[str, Any] | None, counts: dict[str, Any] | None = None) -> str:
        """choice: None in the event that has the usage alone."""
        if counts is None and self._options.continuous_usage_stats:
            counts = counted(self._num_read, self._num_made)
        tail = "" if counts is None else f',"usage":{to_json(counts)}'
        written = f"{self._event_head}{'' if choice is None else ''.join(json_parts(choice))}]{tail}}}\n\n"
        if self._options.include_obfuscation:
            padding = "x" * (-len(written + ',"obfuscation":""') % OBFUSCATED_SIZE)
            written = f'{written[:-3]},"obfuscation":"{padding}"}}\n\n'
        return written

    def all_events(self, outputs: list[RequestOutput]) -> Iterator[str]:
        """Yield one event for each choice, of a reply without new tokens."""
        return chain(map(self._event, self.choices(outputs)), self.end(outputs), [self.done])

    def end(self, outputs: list[RequestOutput]) -> Iterable[str]:
        return [self._event(None, usage(outputs))] if self._options.include_usage else []


def tokens_of(made: Made) -> tuple[list[int], Iterable[tuple[int, Logprobs]]]:
    if isinstance(made, CompletionOutput):
        ids, logprobs = made.token_ids, made.logprobs or ()
    else:
        ids = [] if made.token_id is None else [made.token_id]
        logprobs = [made.logprobs] if made.logprobs else ()
    return ids, zip(ids, logprobs, strict=False)


@dataclass
class Completion(Job):
    """first: log probabilities of all tokens after BOS alone, which `echo` shows for the first token of a prompt."""

    id_prefix = "cmpl-"
    reply_object = event_object = "text_completion"
    first: Logprobs | None = None

    def __post_init__(self):
        super().__post_init__()
        self._prompt_logprobs: dict[int, list[Logprobs | None]] = {}  # of prompts, as soon as they are known
        self._held: list[IndexedChunk] = []  # until then
        self._lists: dict[int, CompletionLogprobs] = {}  # of choices that have begun
        # Of the latest prompt, for all of its samples.
        self._described: tuple[int, list[dict[str, Any] | None]] = (-1, [])

    def choice(self, i: int, made: Made) -> dict[str, Any]:
        """Put the prompt's part into a sample's first choice."""
        form = self.form
        index = i * self.params.n + made.index
        text = made.text or ""
        ids, tokens = tokens_of(made)
        of_prompt: dict[str, Any] = {}
        if index not in self._lists:
            options = bool(form.return_tokens_as_token_ids), bool(form.return_token_ids)
            self._lists[index] = CompletionLogprobs(self.names, form.logprobs or 0, *options)
            of_prompt = self._prompt_fields(i)
            if form.echo:
                text = self._text_of(self.prompts[i]) + text
                tokens = chain(self._prompt_tokens(i), tokens)
        logprobs = None if form.logprobs is None else self._lists[index].add(tokens)
        sample = {"index": index, "text": text, "logprobs": logprobs}
        return sample | self.end_of_choice(made, ids) | of_prompt

    def _prompt_tokens(self, i: int) -> Iterable[tuple[int, Logprobs | None]]:
        prompt = self.prompts[i]
        ids = [] if prompt.text == "" else prompt.token_ids  # without the BOS token of an empty prompt
        return zip(ids, [self.first, *self._prompt_logprobs.get(i, [])[1:]], strict=False)

    def _prompt_fields(self, i: int) -> dict[str, Any]:
        form = self.form
        prompt_ids = self.prompts[i].token_ids
        fields: dict[str, Any] = {"prompt_token_ids": prompt_ids} if form.return_token_ids else {}
        if form.prompt_logprobs is not None:
            if self._described[0] != i:
                pairs = zip(prompt_ids, self._prompt_logprobs.get(i, []), strict=False)
                self._described = i, [described(self.names, form.prompt_logprobs, *pair) for pair in pairs]
            fields["prompt_logprobs"] = self._described[1]
        return fields

    def choices(self, outputs: list[RequestOutput]) -> Iterator[dict[str, Any]]:
        self._prompt_logprobs = {i: output.prompt_logprobs or [] for i, output in enumerate(outputs)}
        return super().choices(outputs)

    def write(self, chunks: list[IndexedChunk]) -> Iterator[str]:
        """Hold chunks until their prompt's log probabilities are known, if they are asked for."""
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs |= {
                i: chunk.prompt_logprobs for i, chunk in chunks if chunk.prompt_logprobs is not None
            }
            chunks = self._held + chunks
            self._held = [pair for pair in chunks if pair[0] not in self._prompt_logprobs]
            chunks = [pair for pair in chunks if pair[0] in self._prompt_logprobs]
        return super().write(chunks)

    def _text_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return b"".join(map(self.names.bytes_of, prompt.token_ids)).decode("utf-8", errors="replace")


class Generation(Job):
    """The request of a RemoteLLM, which reads the records of `wire`."""

    def record(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        samples = (record_to_json(sample) for sample in outputs[0].outputs)
        return output_to_json(replace(outputs[0], outputs=[])) | {"outputs": samples}

    def write(self, chunks: list[IndexedChunk]) -> Iterator[str]:
        return (event({"chunk": chunk_to_json(chunk)}) for _, chunk in chunks)

    def end(self, outputs: list[RequestOutput]) -> Iterable[str]:
        return chain(['data: {"output":'], json_parts(self.record(outputs)), ["}\n\n"])


class EventStream(StreamingResponse):
    """A reply of server-sent events, which ends its work when the client leaves. An error is the last event."""

    def __init__(self, job: Job, work: AsyncRequests, write: Write, end: Callable[[], None]):
        """end: called once, however the reply ends, also if it never begins."""
        super().__init__(self._events(job, work, write), headers=SSE)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self.stream_response(send))
        finally:
            self._end()

    async def _events(self, job: Job, work: AsyncRequests, write: Write) -> AsyncIterator[str | bytes]:
        last = job.done
        try:
            yield job.begin()
            async for chunks in work.chunks(PING_SECONDS):
                async for part in write([PING] if chunks is None else job.write(chunks)):
                    yield part
            async for part in write(job.end(await work.outputs())):
                yield part
        except (ApiError, TinyGPTError) as error:
            refusal = error if isinstance(error, ApiError) else from_engine(error)
            last = event(error_body(refusal)) + job.done
        except Exception:
            log.exception("a bug ended a stream")
            last = event(error_body(BUG)) + job.done
        yield last
