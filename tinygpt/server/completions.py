"""Choices of checked completions and chats, whole and as events; max_tokens 0; suffix."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from ..engine.prompts import Prompt
from ..outputs import CompletionOutput, RequestOutput, StreamChunk
from ..sampling_params import SamplingParams
from ..wire import chunk_to_json, output_to_json, record_to_json
from .looks import activations_to_json
from .protocol import StreamOptions
from .replies import (
    DONE,
    CompletionLogprobs,
    Logprobs,
    PromptChunk,
    TokenNames,
    chat_logprobs,
    counted,
    described,
    event,
    json_parts,
    to_json,
    usage,
)

OBFUSCATED_SIZE = 64  # bytes
MAX_LOGPROBS = 1_000_000  # of a reply, which has up to 70 bytes for each
Made = CompletionOutput | StreamChunk


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
    done = DONE

    def __post_init__(self):
        options = self.form.stream_options or StreamOptions()
        self._ends_with_usage = options.include_usage
        self._tells_usage = options.continuous_usage_stats
        self._is_padded = options.include_obfuscation
        self._num_made = 0
        has_logprobs = self.form.logprobs is not None and self.form.logprobs is not False
        self._tells_all = (
            self._tells_usage or self.form.return_token_ids or has_logprobs
        )  # also tokens without a text
        params = self.params
        of_prompt, of_token = (0 if n is None else n + 1 for n in (params.prompt_logprobs, params.logprobs))
        num_samples = params.best_of or params.n
        num_read = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_made = len(self.prompts) * params.max_tokens
        self.num_logprobs = num_samples * (num_read * of_prompt + num_made * of_token)
        self._event_head = f'data: {to_json(self.head)[:-1]},"choices":['  # of each event

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

    def reply(self, outputs: list[RequestOutput]) -> Iterator[str]:
        choices = self.choices(outputs)
        tail = self.end_of_reply(outputs)
        return json_parts({**self.head, "choices": choices, "usage": usage(outputs), **tail})

    def end_of_reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {}

    def begin(self) -> str:
        return ""

    def write(self, chunks: list[PromptChunk]) -> Iterator[str]:
        for i, chunk in chunks:
            self._num_made += chunk.token_id is not None
            choice = self.choice(i, chunk)
            # The text is empty for a part of a character.
            tells_prompt = choice.get("text") or "prompt_logprobs" in choice
            if chunk.text or chunk.finish_reason or self._tells_all or tells_prompt:
                yield self._event(choice)

    def _event(self, choice: dict[str, Any] | None, counts: dict[str, Any] | None = None) -> str:
        """choice: None in the event that has the usage alone."""
        if counts is None and self._tells_usage:
            counts = counted(sum(len(prompt.token_ids) for prompt in self.prompts), self._num_made)
        tail = "" if counts is None else f',"usage":{to_json(counts)}'
        written = f"{self._event_head}{'' if choice is None else ''.join(json_parts(choice))}]{tail}}}\n\n"
        if self._is_padded:
            padding = "x" * (-len(written + ',"obfuscation":""') % OBFUSCATED_SIZE)
            written = f'{written[:-3]},"obfuscation":"{padding}"}}\n\n'
        return written

    def all_events(self, outputs: list[RequestOutput]) -> Iterator[str]:
        """Yield one event for each choice, of a reply without new tokens."""
        return chain(map(self._event, self.choices(outputs)), self.end(outputs), [self.done])

    def end(self, outputs: list[RequestOutput]) -> Iterable[str]:
        return [self._event(None, usage(outputs))] if self._ends_with_usage else []


def _tokens(made: Made) -> tuple[list[int], Iterable[tuple[int, Logprobs]]]:
    """Return the token ids, and pairs of id and log probabilities."""
    if isinstance(made, CompletionOutput):
        return made.token_ids, zip(made.token_ids, made.logprobs or (), strict=False)
    return [] if made.token_id is None else [made.token_id], [
        (made.token_id, made.logprobs)
    ] if made.logprobs else []


class Chat(Job):
    def choice(self, i: int, made: Made) -> dict[str, Any]:
        ids, tokens = _tokens(made)
        if isinstance(made, CompletionOutput):
            content = {"message": {"role": "assistant", "content": made.text or "", "refusal": None}}
        else:
            content = {"delta": {"content": made.text}}
        logprobs = (
            chat_logprobs(self.names, self.form.top_logprobs or 0, tokens) if self.form.logprobs else None
        )
        return {"index": made.index, **content, "logprobs": logprobs, **self.end_of_choice(made, ids)}

    def end_of_reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {"prompt_token_ids": outputs[0].prompt_token_ids} if self.form.return_token_ids else {}

    def begin(self) -> str:
        delta = {"role": "assistant", "content": ""}
        return "".join(self._event({"index": i, "delta": delta}) for i in range(self.params.n))


@dataclass
class Completion(Job):
    """first: log probabilities of all tokens after BOS alone, which `echo` shows for the first token of a prompt."""

    first: Logprobs | None = None
    _found: dict[int, list[Logprobs | None]] = field(
        default_factory=dict
    )  # of prompts, as soon as they are known
    _lists: dict[int, CompletionLogprobs] = field(default_factory=dict)  # of choices that have begun
    _described: tuple[int, list[dict[str, Any] | None]] = (
        -1,
        [],
    )  # of the latest prompt, for all of its samples
    _held: list[PromptChunk] = field(default_factory=list)

    def choice(self, i: int, made: Made) -> dict[str, Any]:
        """Return the choice; the first of a sample also has the prompt's part."""
        form = self.form
        prompt = self.prompts[i]
        index = i * self.params.n + made.index
        text = made.text or ""
        ids, tokens = _tokens(made)
        if is_first := index not in self._lists:
            options = bool(form.return_tokens_as_token_ids), bool(form.return_token_ids)
            self._lists[index] = CompletionLogprobs(self.names, form.logprobs or 0, *options)
        if is_first and form.echo:
            all_bytes = b"".join(map(self.names.bytes_of, prompt.token_ids))
            text = (
                all_bytes.decode("utf-8", errors="replace") if prompt.text is None else prompt.text
            ) + text
            given = [] if prompt.text == "" else prompt.token_ids  # without the BOS token of an empty prompt
            tokens = chain(zip(given, [self.first, *self._found.get(i, [])[1:]], strict=False), tokens)
        logprobs = None if form.logprobs is None else self._lists[index].add(tokens)
        choice = {"index": index, "text": text, "logprobs": logprobs, **self.end_of_choice(made, ids)}
        if is_first and form.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        if is_first and form.prompt_logprobs is not None:
            if self._described[0] != i:
                pairs = zip(prompt.token_ids, self._found.get(i, []), strict=False)
                self._described = i, [described(self.names, form.prompt_logprobs, *pair) for pair in pairs]
            choice["prompt_logprobs"] = self._described[1]
        return choice

    def choices(self, outputs: list[RequestOutput]) -> Iterator[dict[str, Any]]:
        self._found = {i: output.prompt_logprobs or [] for i, output in enumerate(outputs)}
        return super().choices(outputs)

    def write(self, chunks: list[PromptChunk]) -> Iterator[str]:
        """Hold chunks until their prompt's log probabilities are known, if they are asked for."""
        if self.params.prompt_logprobs is not None:
            self._found |= {
                i: chunk.prompt_logprobs for i, chunk in chunks if chunk.prompt_logprobs is not None
            }
            chunks = self._held + chunks
            self._held = [pair for pair in chunks if pair[0] not in self._found]
            chunks = [pair for pair in chunks if pair[0] in self._found]
        return super().write(chunks)


class Generation(Job):
    """The request of a RemoteLLM, which reads the records of `wire`."""

    def reply(self, outputs: list[RequestOutput]) -> Iterator[str]:
        samples = (record_to_json(sample) for sample in outputs[0].outputs)
        return json_parts(output_to_json(replace(outputs[0], outputs=[])) | {"outputs": samples})

    def write(self, chunks: list[PromptChunk]) -> Iterator[str]:
        return (event({"chunk": chunk_to_json(chunk)}) for _, chunk in chunks)

    def end(self, outputs: list[RequestOutput]) -> Iterable[str]:
        return chain(['data: {"output":'], self.reply(outputs), ["}\n\n"])


def scoring_request(prompt: Prompt, params: SamplingParams, bos: int | None) -> tuple[Prompt, SamplingParams]:
    """Return the request for max_tokens 0: the prompt without its last token, which alone is allowed."""
    context = prompt.token_ids[:-1] or [prompt.token_ids[0] if bos is None else bos]
    forced = SamplingParams(
        max_tokens=1,
        allowed_token_ids=prompt.token_ids[-1:],
        logprobs=params.prompt_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        max_time=params.max_time,
        soft_prompt=params.soft_prompt,
    )
    return replace(prompt, token_ids=context), forced


def scored(prompt: Prompt, params: SamplingParams, output: RequestOutput) -> RequestOutput:
    """Return the prompt's output without new tokens, from its scoring request's output."""
    [forced] = output.outputs
    found = None
    if output.prompt_logprobs is not None:
        last = forced.logprobs or []
        found = [*output.prompt_logprobs[: len(prompt.token_ids) - len(last)], *last]
    empty = replace(forced, text="", token_ids=[], finish_reason="length", stop_reason=None, logprobs=[])
    samples = [replace(empty, index=i) for i in range(params.n)]
    return replace(output, prompt_token_ids=prompt.token_ids, outputs=samples, prompt_logprobs=found)


# `suffix`: GPT-2 cannot write towards a given end, so `best_of` candidates are ranked by the suffix's probability.


def with_suffix(
    candidates: list[RequestOutput], suffix: Prompt, stop: Sequence[str], encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the tokens of each prompt, candidate and suffix, without the token that ended the candidate."""
    found = []
    for output in candidates:
        for sample in output.outputs:
            if sample.stop_reason in stop:  # a stop string may cut a token
                ids = encode(sample.text)
            else:
                ids = sample.token_ids[:-1] if isinstance(sample.stop_reason, int) else sample.token_ids
            found.append(output.prompt_token_ids + ids + suffix.token_ids)
    return found


def ranked(candidates: list[RequestOutput], readings: list[RequestOutput], n: int) -> list[RequestOutput]:
    """Return the n samples of each output with the highest mean log probability of sample and suffix.

    readings: the outputs of `with_suffix`'s tokens as prompts, with prompt_logprobs.
    """
    left, outputs = iter(readings), []
    for output in candidates:
        start, means = len(output.prompt_token_ids), []
        for reading in islice(left, len(output.outputs)):
            pairs = zip(reading.prompt_token_ids[start:], reading.prompt_logprobs[start:], strict=True)
            means.append(sum(found[i] for i, found in pairs) / (len(reading.prompt_token_ids) - start))
        best = sorted(zip(output.outputs, means, strict=True), key=itemgetter(1), reverse=True)[:n]
        outputs.append(
            replace(output, outputs=[replace(sample, index=i) for i, (sample, _) in enumerate(best)])
        )
    return outputs
