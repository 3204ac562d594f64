"""Api: the handlers of all routes. Requests are checked before any work."""

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any
from weakref import WeakSet

import numpy as np
from fastapi import Request
from starlette.responses import Response

import tinygpt

from ..engine.prompts import Prompt, encode
from ..errors import CheckpointError, NoTokenizerError, RequestError, TinyGPTError
from ..llm import LLM
from ..look.edits import ControlVector, salt_of
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..text.chat import Template, chat_ids
from ..wire import record_to_json
from . import protocol
from .completions import (
    MAX_LOGPROBS,
    Chat,
    Completion,
    Generation,
    Job,
    ranked,
    scored,
    scoring_request,
    with_suffix,
)
from .looks import check_size, lens_to_json, look_params
from .metrics import Metrics
from .replies import RETRY, ApiError, TokenNames, from_engine, json_large, whole
from .responses import Responses
from .running import SSE, ChunkQueue, EventStream, Requests, Result, RunningRequest, while_connected

log = logging.getLogger("tinygpt.server")
LARGE = 8192  # bytes of a body; a thread reads a larger body, which would block the loop for milliseconds
DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions

Run = Callable[[Any, Request], Awaitable[list[RequestOutput]]]


@dataclass(frozen=True)
class ServerConfig:
    """The operator's settings.

    served_model_names: names of the model for clients; replies use the first.
    api_keys: one of them must come with each request; empty: no key is needed.
    allowed_hosts: values of the Host header; None is any. allowed_origins: web pages that may read replies.
    enable_log_requests: log each body, and so its prompts.
    chat_template: None is the LLM's. ignores_unknown_fields: of requests, which are refused otherwise.
    look: requests may capture and edit activations. control_vectors: by the names in a request's `steer`.
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_logprobs: int = 20
    enable_log_requests: bool = False
    chat_template: Template | None = None
    ignores_unknown_fields: bool = False
    look: bool = False
    control_vectors: Mapping[str, ControlVector] | None = None


class Api:
    """The state that all requests share, and the handler of each route."""

    def __init__(self, llm: LLM, config: ServerConfig):
        self.llm = llm
        self.config = config
        self.started = int(time.time())
        self.model_name = config.served_model_names[0]
        self.model_names = (*config.served_model_names, *llm.lora_modules)
        self.metrics = Metrics(llm, self.model_name)
        self.is_draining = False
        self._works: WeakSet[RunningRequest] = WeakSet()
        self._first: dict[int, float] | None = None
        self._turn, self._num_in_turn = asyncio.Lock(), 0  # embeddings and scores: each between two steps
        self.huge = asyncio.Lock()  # of the request that has a huge body, until it is read
        try:
            self.names = TokenNames(llm.tokenizer)
        except CheckpointError:
            self.names = TokenNames(None)
        self.chat_template = config.chat_template
        try:
            self.chat_template = self.chat_template or llm.chat_template
        except TinyGPTError as error:
            log.warning(f"no chat, but all else: {error}")

    @cached_property
    def outbox(self) -> ChunkQueue:
        return ChunkQueue(self.llm)

    def checked(
        self, handle: Callable[[Any, Request], Awaitable[Response]]
    ) -> Callable[..., Awaitable[Response]]:
        """Return the handler with the checks of all POST routes; its work ends when the client leaves."""

        @wraps(handle)
        async def answer(form: Any, request: Request) -> Response:
            self.check_model(form.model)
            if form.model in self.llm.lora_modules and isinstance(form, protocol.NOT_GENERATING):
                raise ApiError(
                    400, f"the adapter {form.model!r} only generates: ask {self.model_name!r}.", "model"
                )
            if (
                getattr(form, "add_special_tokens", None) is False
                and self.names.has_tokenizer
                and self.encode("")
            ):
                message = "add_special_tokens is false, but this tokenizer adds tokens to each text: send token ids."
                raise ApiError(400, message, "add_special_tokens")
            for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
                count = getattr(form, field, None)
                limit = self.config.max_logprobs
                if type(count) is int and count > limit:  # a chat's logprobs is true or false
                    raise ApiError(400, f"{field} is {count}, and this server gives at most {limit}.", field)
            try:
                return await while_connected(request.receive, handle(form, request))
            except TinyGPTError as error:
                raise from_engine(error, form) from None
            except asyncio.CancelledError:  # uvicorn does not wait for a thread that does not end
                raise self.outbox.stopped or asyncio.CancelledError from None

        return answer

    async def completions(self, form: protocol.CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        prompts = await self._prompts(_listed(form.prompt), form, request)
        max_tokens = self._max_tokens(form, prompts, form.max_tokens, DEFAULT_MAX_TOKENS)
        counts = [form.prompt_logprobs, form.logprobs if form.echo else None]
        most = max((count for count in counts if count is not None), default=None)
        others = {"max_tokens": max(max_tokens, 1), "logprobs": form.logprobs, "prompt_logprobs": most}
        params = await self._params(form, request, **others)
        shows_first = form.echo and form.logprobs is not None and params.soft_prompt is None
        first = await self._first_logprobs() if shows_first else None
        job = Completion(
            self._head("cmpl-", "text_completion", form), form, prompts, params, self.names, first
        )
        chooses = form.suffix and (params.best_of or params.n) > params.n and params.temperature > 0
        if max_tokens and (form.stream or not chooses):
            return await self._answer(job, request)
        return await self._answer(job, request, self._best_before_suffix if max_tokens else self._scored)

    async def chat(self, form: protocol.ChatRequest, request: Request) -> Response:
        """Answer messages."""
        if form.top_logprobs is not None and not form.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", "top_logprobs")
        if form.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs is not available in a chat.", "prompt_logprobs")
        messages = [
            {"role": each.role, "content": protocol.text_of(each)}
            | ({} if each.name is None else {"name": each.name})
            for each in form.messages
        ]
        prompts = await self._conversation(messages, form, request)
        given = form.max_completion_tokens or form.max_tokens
        max_tokens = self._max_tokens(form, prompts, given, self.llm.max_model_len)
        logprobs = (form.top_logprobs or 0) if form.logprobs else None
        params = await self._params(form, request, max_tokens=max_tokens, logprobs=logprobs)
        kind = "chat.completion.chunk" if form.stream else "chat.completion"
        return await self._answer(
            Chat(self._head("chatcmpl-", kind, form), form, prompts, params, self.names), request
        )

    async def responses(self, form: protocol.ResponsesRequest, request: Request) -> Response:
        """Answer a text or messages, as /v1/chat/completions does."""
        prompts = await self._conversation(form.messages(), form, request)
        max_tokens = self._max_tokens(form, prompts, form.max_tokens, self.llm.max_model_len)
        params = await self._params(form, request, max_tokens=max_tokens)
        head = self._head("resp_", "response", form)
        return await self._answer(Responses(head, form, prompts, params, self.names), request)

    async def _conversation(
        self, messages: list[dict[str, str]], form: Any, request: Request
    ) -> list[Prompt]:
        if self.chat_template is None:
            how = "start the server with --chat-template plain, or a file, or use /v1/completions"
            raise ApiError(400, f"{self.model_name} has no chat template: {how}.", code="no_chat_template")
        options = getattr(form, "chat_template_kwargs", None)
        tokenizer = self.llm.tokenizer
        adds_prompt = getattr(form, "add_generation_prompt", True)
        ids = await asyncio.to_thread(chat_ids, self.chat_template, tokenizer, messages, options, adds_prompt)
        return await self._prompts([ids], form, request)

    async def generate(self, form: protocol.GenerateRequest, request: Request) -> Response:
        """Continue one prompt as LLM.submit does, for RemoteLLM."""
        prompts = await self._prompts([form.prompt or ""], form, request)
        params = await self._params(form, request, max_tokens=form.max_tokens, logprobs=form.logprobs)
        return await self._answer(Generation({}, form, prompts, params, self.names), request)

    async def _answer(self, job: Job, request: Request, run: Run | None = None) -> Response:
        """run: gives all outputs at once; None runs the prompts."""
        # The operator's limit holds for a sample of the model's length.
        limit = max(MAX_LOGPROBS, (self.config.max_logprobs + 1) * self.llm.max_model_len)
        if job.num_logprobs > limit:
            fields = ("prompt_logprobs", "top_logprobs", "logprobs")
            field = next(name for name in fields if getattr(job.form, name, None) is not None)
            asked = f"{field} asks for {job.num_logprobs} log probabilities, of all tokens of all samples together"
            raise ApiError(
                400, f"{asked}; this server gives at most {limit} in a reply: split the request.", field
            )
        if job.params.capture or job.params.edits:
            if run is not None:
                message = "capture, edits and steer need max_tokens of 1 or more, and no suffix."
                raise ApiError(400, message, "max_tokens")
            check_size(self.llm, job.params, job.prompts)
        requests = [(prompt, job.params) for prompt in job.prompts]
        if job.form.stream and run is None:
            work = await self._work(requests, True, request)
            return EventStream(job, work, partial(self._end, request, work))
        outputs = await (run(job, request) if run else self._run(requests, request))
        if job.form.stream:
            return Response(await whole(job.all_events(outputs)), headers=SSE)
        return Response(await whole(job.reply(outputs)), media_type="application/json")

    async def _scored(self, job: Completion, request: Request) -> list[RequestOutput]:
        """Return the outputs of max_tokens 0."""
        bos = self.llm.config.bos_token_id
        found = await self._run([scoring_request(prompt, job.params, bos) for prompt in job.prompts], request)
        return [scored(prompt, job.params, output) for prompt, output in zip(job.prompts, found, strict=True)]

    async def _best_before_suffix(self, job: Completion, request: Request) -> list[RequestOutput]:
        prompts, params = job.prompts, job.params
        [suffix] = await self._prompts([job.form.suffix], job.form, request, "suffix")
        total = (
            max(len(prompt.token_ids) for prompt in prompts) + params.max_tokens + len(suffix.token_ids) + 1
        )
        if total > (limit := self.llm.max_model_len):
            message = f"this model's context has {limit} tokens; prompt, max_tokens and suffix take {total}."
            raise ApiError(400, message, "suffix", "context_length_exceeded")
        all_of_them = replace(params, n=params.best_of, best_of=None)
        candidates = await self._run([(prompt, all_of_them) for prompt in prompts], request)
        reading = SamplingParams(max_tokens=1, prompt_logprobs=0)
        texts = [
            (Prompt(None, ids), reading) for ids in with_suffix(candidates, suffix, params.stop, self.encode)
        ]
        return ranked(candidates, await self._run(texts, request), params.n)

    async def _run(self, requests: Requests, request: Request) -> list[RequestOutput]:
        work = await self._work(requests, False, request)
        try:
            return await work.outputs()
        finally:
            self._end(request, work)

    async def _work(self, requests: Requests, stream: bool, request: Request) -> RunningRequest:
        self.check_open()
        sizes = self.llm.engine.engine_config
        count = sum(params.best_of or params.n for _, params in requests)
        if sizes.max_queue is not None and count > (room := sizes.max_queue + sizes.max_num_seqs):
            raise ApiError(
                400, f"the request asks for {count} samples; this server takes {room} at most: split it."
            )
        work = RunningRequest(self.llm, self.outbox)
        self._works.add(work)
        await work.submit(requests, stream, len(request._body) > LARGE)
        return work

    def _end(self, request: Request, work: RunningRequest) -> None:
        work.cancel()
        found = work.found()
        self.metrics.observe(found, work.token_gaps())
        firsts = [progress.metrics.time_to_first_token for progress, _ in found]
        request.state.notes |= {
            "prompt_tokens": sum(progress.num_prompt_tokens for progress, _ in found),
            "completion_tokens": sum(progress.num_new_tokens for progress, _ in found),
            "queue": round(max((progress.metrics.queue_time for progress, _ in found), default=0.0), 6),
            "ttft": min((round(first, 6) for first in firsts if first is not None), default=None),
            "finish": ",".join(sorted({reason for _, reasons in found for reason in reasons})),
        }

    def stop_all(self) -> None:
        """End all work; each client is told why."""
        reason = "the server was shut down before this was finished: ask again."
        self.outbox.stopped = ApiError(503, reason, code="shutting_down")
        for work in list(self._works):
            work.cancel()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text whose special tokens are plain text."""
        return encode(text, self.llm.tokenizer, self.llm.config.vocab_size, split_special_tokens=True)

    async def _prompts(
        self, given: list[Any], form: Any, request: Request, field: str = "prompt"
    ) -> list[Prompt]:
        """field: name of the prompts in the request."""
        self.check_open()
        is_split = form.split_special_tokens is not False
        try:
            return await read_apart(request, lambda: [self.llm.read_prompt(each, is_split) for each in given])
        except (RequestError, NoTokenizerError) as error:
            raise ApiError(400, str(error), field) from None

    async def _params(self, form: protocol.SamplingFields, request: Request, **others: Any) -> SamplingParams:
        if form.model in self.llm.lora_modules:
            others["lora_request"] = form.model

        def read() -> SamplingParams:
            looks = isinstance(form, protocol.LookFields)
            more = look_params(form, self.config.look, self.config.control_vectors or {}) if looks else {}
            return form.sampling_params(self.encode, **others, **more)

        params = await read_apart(request, read)
        await request.state.reading.aclose()
        request.state.notes["edits"] = (
            f"{salt_of(params.edits, 0):016x}" if params.edits else None
        )  # a digest
        return params

    def _max_tokens(self, form: Any, prompts: list[Prompt], given: int | None, most: int) -> int:
        """Return `given`, or else the room after the longest prompt up to `most`. ApiError if it does not fit."""
        limit = self.llm.max_model_len
        num_virtual = self.llm.num_virtual_tokens(form.soft_prompt)
        read = num_virtual + max(len(prompt.token_ids) for prompt in prompts)
        if given is None:
            given = max(min(limit - read, most), 1)
        if read + given > limit and form.overflow in (None, "refuse"):
            asked = f"{read + given} were asked for: {read} in the prompt and {given} to generate"
            field = form.name_of("max_tokens" if read < limit else "prompt")
            message = f"this model's context has {limit} tokens, and {asked}."
            raise ApiError(400, message, field, "context_length_exceeded")
        return given

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            listed = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist: this server has {listed}."
            raise ApiError(404, message, "model", "model_not_found")

    def check_open(self) -> None:
        if self.is_draining:  # the next connection may reach another server
            raise ApiError(503, "the server is shutting down: try again later.", **RETRY, connection="close")

    def _head(self, prefix: str, kind: str, form: Any) -> dict[str, Any]:
        return {
            "id": prefix + secrets.token_hex(16),
            "object": kind,
            "created": int(time.time()),
            "model": form.model or self.model_name,
            "system_fingerprint": f"tinygpt-{tinygpt.__version__}-{self.llm.dtype}",
        }

    async def _first_logprobs(self) -> dict[int, float] | None:
        """Return log probabilities of all tokens after BOS alone, computed once; None without a BOS token."""
        bos = self.llm.config.bos_token_id
        if self._first is None and bos is not None:
            params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
            output = await asyncio.wrap_future(self.llm.submit(Prompt(None, [bos, bos]), params))
            self._first = output.prompt_logprobs[1]
        return self._first

    async def _in_turn(self, calls: list[Callable[[], Result]]) -> list[Result]:
        """Return the calls' results. Each runs in a thread, between the calls of other requests."""
        self.check_open()
        max_queue = self.llm.engine.engine_config.max_queue
        if max_queue is not None and self._num_in_turn >= max_queue:
            raise ApiError(429, "too many requests are waiting.", code="queue_full", **RETRY)
        self._num_in_turn += 1
        try:
            results = []
            for call in calls:
                async with self._turn:
                    if self.outbox.stopped is not None:
                        raise self.outbox.stopped
                    results.append(await asyncio.to_thread(call))
            return results
        finally:
            self._num_in_turn -= 1

    async def _inputs(self, given: Any, form: Any, request: Request, field: str) -> tuple[list[Prompt], int]:
        """Return prompts that nothing follows, and the number of tokens."""
        prompts = await self._prompts(_listed(given), form, request, field)
        limit = self.llm.max_model_len
        if (longest := max(len(prompt.token_ids) for prompt in prompts)) > limit:
            message = f"this model's context has {limit} tokens, and {field} has one of {longest}."
            raise ApiError(400, message, field, "context_length_exceeded")
        await request.state.reading.aclose()
        count = sum(len(prompt.token_ids) for prompt in prompts)
        request.state.notes["prompt_tokens"] = request.state.notes.get("prompt_tokens", 0) + count
        return prompts, count

    async def _vectors(self, given: Any, form: Any, request: Request, field: str) -> tuple[np.ndarray, int]:
        """Return the embeddings, (N, C) float32, and the number of tokens."""
        prompts, count = await self._inputs(given, form, request, field)
        vectors = await self._in_turn([partial(self.llm.embed, prompt, form.pooling) for prompt in prompts])
        return np.concatenate(vectors), count

    async def classify(self, form: protocol.ClassifyRequest, request: Request) -> Response:
        """Return the label of each text and its probabilities, or those of each token."""
        prompts, count = await self._inputs(form.input, form, request, "input")
        found = await self._in_turn([partial(self.llm.classify, prompt) for prompt in prompts])
        names = "label", "probs", "num_classes"
        data = ({"index": i} | {name: getattr(one, name) for name in names} for i, [one] in enumerate(found))
        return await self._list(form, data, count, "classify-")

    async def lens(self, form: protocol.LensRequest, request: Request) -> Response:
        """Return what each layer would say after a prompt, and how much its last token attends to each."""
        if not self.config.look:
            raise ApiError(400, "/lens needs a server that was started with --look.")
        [prompt], _ = await self._inputs(form.prompt, form, request, "prompt")
        return await json_large(*await self._in_turn([partial(lens_to_json, self.llm, prompt, self.names)]))

    async def embeddings(self, form: protocol.EmbeddingRequest, request: Request) -> Response:
        """Return a vector for each text."""
        if form.dimensions not in (None, width := self.llm.config.n_embd):
            message = f"dimensions is {form.dimensions}, and this model's vectors have {width}."
            raise ApiError(400, message, "dimensions")
        vectors, count = await self._vectors(form.input, form, request, "input")
        if form.encoding_format == "float":
            written = vectors.tolist()
        else:
            written = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = ({"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(written))
        return await self._list(form, data, count)

    async def score(self, form: protocol.ScoreRequest, request: Request) -> Response:
        """Return the cosines of texts' embeddings."""
        num_first = len(_listed(form.text_1))
        num_second = len(_listed(form.text_2))
        if num_first not in (1, num_second):
            message = f"text_1 has {num_first} texts and text_2 {num_second}: send one text_1, or one for each text_2."
            raise ApiError(400, message, "text_1")
        first, count_1 = await self._vectors(form.text_1, form, request, "text_1")
        second, count_2 = await self._vectors(form.text_2, form, request, "text_2")
        first = first.astype(np.float64)
        second = second.astype(np.float64)
        lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)  # (N,)
        products = (first * second).sum(axis=1)  # (N,)
        cosines = np.clip(
            np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0), -1, 1
        )  # (N,)
        data = ({"object": "score", "index": i, "score": cosine} for i, cosine in enumerate(cosines.tolist()))
        return await self._list(form, data, count_1 + count_2, "score-")

    async def _list(self, form: Any, data: Iterable[Any], count: int, prefix: str = "") -> Response:
        """prefix: of an id, which embeddings do not have."""
        head = {"id": prefix + secrets.token_hex(16), "created": int(time.time())} if prefix else {}
        counts = {"prompt_tokens": count, "total_tokens": count}
        more = {"object": "list", "model": form.model or self.model_name, "data": data, "usage": counts}
        return await json_large(head | more)

    async def score_continuations(self, form: protocol.ContinuationsRequest, request: Request) -> Response:
        """Return log probabilities of continuations, as LLM.score does, for RemoteLLM."""
        is_split = form.split_special_tokens is not False
        score = partial(
            self.llm.score, form.prompt or "", soft_prompt=form.soft_prompt, split_special_tokens=is_split
        )
        await request.state.reading.aclose()
        found = await self._in_turn([partial(score, [each]) for each in form.continuations])
        return await json_large({"scores": (record_to_json(each) for [each] in found)})


async def read_apart(request: Request, read: Callable[[], Result]) -> Result:
    return read() if len(request._body) <= LARGE else await asyncio.to_thread(read)


def _listed(given: Any) -> list[Any]:
    """Return the prompts of a text, a list of ids, or a list of either."""
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given or ""]
