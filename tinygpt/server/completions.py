"""Completions: the choices of a checked request, whole and as events; max_tokens 0; suffix."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from tinygpt.engine.prompts import Prompt
from tinygpt.outputs import CompletionOutput, RequestOutput, StreamChunk
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.chat import Chat
from tinygpt.server.protocol import CompletionRequest
from tinygpt.server.replies import PING as PING_COMMENT
from tinygpt.server.replies import CompletionLogprobs, EventWriter, TokenNames, described, usage
from tinygpt.server.work import PING, PromptChunk, Work

Found = list[dict[int, float] | None]  # log probabilities of a prompt's tokens


@dataclass
class Completion:
    """A checked completion. head: the beginning of every reply and event.

    first: log probabilities of all tokens after BOS alone, which `echo` shows for the first token of a prompt.
    """

    head: dict[str, Any]
    form: CompletionRequest
    prompts: list[Prompt]
    params: SamplingParams
    names: TokenNames
    first: dict[int, float] | None = None
    _found: dict[int, Found] = field(default_factory=dict)  # of prompts whose log probabilities are known
    _lists: dict[int, CompletionLogprobs] = field(default_factory=dict)  # of choices that have begun
    _held: list[PromptChunk] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def reply(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        num_made = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {**self.head, "choices": self.choices(outputs), "usage": usage(self.num_read, num_made)}

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        self._found = {i: output.prompt_logprobs or [] for i, output in enumerate(outputs)}
        return [
            self._choice(i, sample, sample.token_ids, sample.logprobs or ())
            for i, output in enumerate(outputs)
            for sample in output.outputs
        ]

    def first_choices(self) -> list[dict[str, Any]]:
        return []

    def ready(self, chunks: list[PromptChunk]) -> list[PromptChunk]:
        """Return the chunks whose prompt's log probabilities are known, if they are asked for, and hold the others."""
        if self.params.prompt_logprobs is None:
            return chunks
        for i, chunk in chunks:
            if chunk.prompt_logprobs is not None:
                self._found[i] = chunk.prompt_logprobs
        chunks = self._held + chunks
        self._held = [pair for pair in chunks if pair[0] not in self._found]
        return [pair for pair in chunks if pair[0] in self._found]

    def chunk_choice(self, i: int, chunk: StreamChunk) -> dict[str, Any]:
        token_ids = [] if chunk.token_id is None else [chunk.token_id]
        if self.form.logprobs is not None or chunk.finish_reason is not None or self.tells_prompt(i, chunk):
            return self._choice(i, chunk, token_ids, [] if chunk.logprobs is None else [chunk.logprobs])
        ids = {"token_ids": token_ids} if self.form.return_token_ids else {}
        index = i * self.params.n + chunk.index
        return {"index": index, "text": chunk.text, "logprobs": None, "finish_reason": None, **ids}

    def tells_prompt(self, i: int, chunk: StreamChunk) -> bool:
        """Return whether the chunk begins a choice that tells something of its prompt."""
        form = self.form
        asked = form.echo or form.return_token_ids or form.prompt_logprobs is not None
        return bool(asked) and i * self.params.n + chunk.index not in self._lists

    def _choice(
        self, i: int, made: CompletionOutput | StreamChunk, token_ids: list[int], found: Sequence[dict[int, float]]
    ) -> dict[str, Any]:
        """Return the choice of a whole sample or of one token; the first of a choice also has the prompt's part."""
        form, prompt, index = self.form, self.prompts[i], i * self.params.n + made.index
        text, tokens, is_first = made.text or "", zip(token_ids, found, strict=False), index not in self._lists
        if is_first:
            options = bool(form.return_tokens_as_token_ids), bool(form.return_token_ids)
            self._lists[index] = CompletionLogprobs(self.names, form.logprobs or 0, *options)
        if is_first and form.echo:
            text = self._prompt_text(prompt) + text
            given = [] if prompt.text == "" else prompt.token_ids  # without the BOS token of an empty prompt
            tokens = chain(zip(given, [self.first, *self._found.get(i, [])[1:]], strict=False), tokens)
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if form.logprobs is None else self._lists[index].add(tokens),
            "finish_reason": made.finish_reason,
        }
        if made.finish_reason is not None:
            choice["stop_reason"] = made.stop_reason
        if form.return_token_ids:
            choice |= {"token_ids": token_ids} | ({"prompt_token_ids": prompt.token_ids} if is_first else {})
        if is_first and form.prompt_logprobs is not None:
            pairs = zip(prompt.token_ids, self._found.get(i, []), strict=False)
            choice["prompt_logprobs"] = [described(self.names, form.prompt_logprobs, *pair) for pair in pairs]
        return choice

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return b"".join(map(self.names.bytes_of, prompt.token_ids)).decode("utf-8", errors="replace")


async def events(job: Completion | Chat, work: Work) -> AsyncIterator[bytes]:
    """Yield the events of a streamed reply; chunks that come together are written together."""
    writer = EventWriter(job.head, job.form.stream_options, job.num_read)
    if begin := job.first_choices():
        yield "".join(map(writer.write, begin)).encode()
    tells_all = writer.tells_usage or bool(job.form.return_token_ids) or job.form.logprobs not in (None, False)
    async for chunks in work.chunks():
        if chunks is PING:
            yield PING_COMMENT
            continue
        written = []
        for i, chunk in job.ready(chunks):
            writer.num_made += chunk.token_id is not None
            # The text is empty for a part of a character.
            if chunk.text or chunk.finish_reason or tells_all or job.tells_prompt(i, chunk):
                written.append(writer.write(job.chunk_choice(i, chunk)))
        if written:
            yield "".join(written).encode()
    yield writer.end()


def whole_events(job: Completion, outputs: list[RequestOutput]) -> bytes:
    """Return the events of a reply that is complete already: one for each choice."""
    writer = EventWriter(job.head, job.form.stream_options, job.num_read)
    writer.num_made = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return "".join(map(writer.write, job.choices(outputs))).encode() + writer.end()


def scoring_request(prompt: Prompt, params: SamplingParams, bos: int | None) -> tuple[Prompt, SamplingParams]:
    """Return the request for max_tokens 0: the prompt without its last token, which is the only token allowed."""
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
    """Return the output that the prompt would have with no token generated, from its scoring request's output."""
    [forced] = output.outputs
    found = None
    if output.prompt_logprobs is not None:
        last = forced.logprobs or []
        found = [*output.prompt_logprobs[: len(prompt.token_ids) - len(last)], *last]
    empty = replace(forced, text="", token_ids=[], finish_reason="length", stop_reason=None, logprobs=[])
    samples = [replace(empty, index=i) for i in range(params.n)]
    return replace(output, prompt_token_ids=prompt.token_ids, outputs=samples, prompt_logprobs=found)


# `suffix`: GPT-2 cannot write towards a given end, so `best_of` candidates are ranked by the suffix's probability.


def suffix_ids(
    candidates: list[RequestOutput], suffix: Prompt, stop: Sequence[str], encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the tokens of each candidate's text and of the suffix, without the token that ended the text."""
    found = []
    for sample in (sample for output in candidates for sample in output.outputs):
        if sample.stop_reason in stop:  # a stop string may cut a token
            ids = encode(sample.text)
        else:
            ids = sample.token_ids[:-1] if isinstance(sample.stop_reason, int) else sample.token_ids
        found.append(ids + suffix.token_ids)
    return found


def ranked(
    candidates: list[RequestOutput], ids: list[list[int]], readings: list[RequestOutput], n: int
) -> list[RequestOutput]:
    """Return the n samples of each output with the highest mean log probability of text and suffix.

    readings: outputs of prompt, text and suffix with prompt_logprobs, one for each of `ids`.
    """
    pairs, outputs = iter(zip(ids, readings, strict=True)), []

    def mean(tokens: list[int], reading: RequestOutput) -> float:
        logprobs = reading.prompt_logprobs[-len(tokens) :]
        return sum(found[token_id] for token_id, found in zip(tokens, logprobs, strict=True)) / len(tokens)

    for output in candidates:
        means = [(mean(*next(pairs)), sample) for sample in output.outputs]
        best = sorted(means, key=lambda pair: pair[0], reverse=True)[:n]
        outputs.append(replace(output, outputs=[replace(sample, index=i) for i, (_, sample) in enumerate(best)]))
    return outputs
