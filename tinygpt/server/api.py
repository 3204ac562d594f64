"""Api: the state of a server, the checks of each request, and the handlers of the routes that generate text."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import Request
from starlette.responses import Response

import tinygpt

from ..async_llm import Outbox, ToCall
from ..engine.engine import RequestFuture
from ..engine.prompts import Prompt, encode
from ..engine.sequence import Request as EngineRequest
from ..errors import CheckpointError, NoTokenizerError, RequestError, TinyGPTError
from ..llm import LLM
from ..look.edits import salt_of
from ..outputs import ThreadFuture
from ..sampling_params import SamplingParams
from ..text.chat import PlainTemplate, chat_ids
from . import protocol
from .chats import Chat, ChatRequest, Responses, ResponsesRequest
from .client_fields import CHAT_TOOLS
from .config import ServerConfig
from .monitoring import Metrics, RunningRequest
from .refusals import RETRY, ApiError, from_engine
from .replies import Completion, EventStream, Generation, Job, TokenNames
from .turns import Turns, in_slices, json_reply, read_apart, while_connected

log = logging.getLogger("tinygpt.server")
DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions
FILLING = -1  # llama.cpp's number of tokens that fill the context, and vLLM's of a prompt
ANY_MODEL = "dummy"  # of huggingface_hub's client
SEES_NO_TOOLS = "sees no tools: a chat with tools is answered by a text"
MAX_LOGPROBS = 1_000_000  # of a reply
BYTES_OF_PROMPT = 8  # of a byte in a body: texts, token ids and fields, until the request has ended

Pair = tuple[Prompt, SamplingParams]
Make = Callable[[ToCall], list[EngineRequest]]
Handler = TypeVar("Handler", bound=Callable)
JobKind = TypeVar("JobKind", bound=Job)


def route(path: str, *methods: str, **options: Any) -> Callable[[Handler], Handler]:
    """options: FastAPI's."""

    def mark(handler: Handler) -> Handler:
        handler.route = path, methods, options
        return handler

    return mark


class Api:
    def __init__(self, llm: LLM, config: ServerConfig):
        self.llm = llm
        self.config = config
        self.started = int(time.time())
        self.model_name = config.served_model_names[0]
        self.model_names = (*config.served_model_names, *llm.lora_modules)
        self.metrics = Metrics(llm, self.model_name)
        self.is_draining = False
        self._running: WeakSet[RunningRequest] = WeakSet()
        self._first: dict[int, float] | None = None
        self.turns = Turns()
        try:
            self.names = TokenNames(llm.tokenizer)
        except CheckpointError:
            self.names = TokenNames(None)
        self.chat_template = config.chat_template
        try:
            self.chat_template = self.chat_template or llm.chat_template
            if self.chat_template is None and self.names.has_tokenizer:
                self.chat_template = PlainTemplate()
                log.info(
                    f"{self.model_name} has no chat template, so chats are continued (--chat-template plain)"
                )
        except TinyGPTError as error:
            log.warning(f"no chat, but all else: {error}")

    @property
    def shows_tools(self) -> bool:
        return self.chat_template is not None and self.chat_template.shows_tools

    def checked(self, handle: Callable[[Any, Request], Awaitable[Response]]) -> Callable:
        """Return the handler with the checks of all POST routes; its work ends when the client leaves."""

        @wraps(handle)
        async def answer(form: Any, request: Request) -> Response:
            if form.model == ANY_MODEL and ANY_MODEL not in self.model_names:
                form.model = None
            self.check_model(form.model)
            if form.model in self.llm.lora_modules and not form.takes_adapter:
                message = f"the adapter {form.model!r} only generates: ask {self.model_name!r}."
                raise ApiError(400, message, "model")
            adds_none = getattr(form, "add_special_tokens", None) is False
            if adds_none and self.names.has_tokenizer and self.encode(""):
                message = "add_special_tokens is false, but this tokenizer adds tokens to each text: send token ids."
                raise ApiError(400, message, "add_special_tokens")
            limit = self.config.max_logprobs
            for field in form.logprobs_fields():
                count = getattr(form, field)
                if count is not None and count > limit:
                    raise ApiError(400, f"{field} is {count}, and this server gives at most {limit}.", field)
            try:
                return await while_connected(request.receive, handle(form, request))
            except TinyGPTError as error:
                raise from_engine(error, form.name_of) from None
            except asyncio.CancelledError:  # uvicorn does not wait for a thread that does not end
                raise self.turns.shutdown_error or asyncio.CancelledError from None

        return answer

    @route("/v1/completions", "POST")
    async def completions(self, form: protocol.CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        if form.suffix and (form.best_of or 0) > (form.n or 1):
            message = "suffix chooses no candidates, as GPT-2 cannot write towards an end: leave out suffix or best_of."
            raise ApiError(400, message, "suffix")
        prompts = await self.read_prompts(form.prompt, form, request)
        prompts = self._shortened(form, prompts, form.max_tokens)
        most = DEFAULT_MAX_TOKENS if form.max_tokens is None else self.llm.max_model_len
        max_tokens = self._max_tokens(form, prompts, form.max_tokens, most)
        counts = [form.prompt_logprobs, form.logprobs if form.echo else None]
        most = max((count for count in counts if count is not None), default=None)
        fields = {"max_tokens": max_tokens, "logprobs": form.logprobs, "prompt_logprobs": most}
        job = await self._job(Completion, prompts, form, request, **fields)
        params = job.params
        if form.echo and form.logprobs is not None and params.soft_prompt is None:
            job.first = await self._first_logprobs()
        return await self._answer(job, request)

    @route("/v1/chat/completions", "POST")
    async def chat(self, form: ChatRequest, request: Request) -> Response:
        """Answer messages."""
        is_lenient = self.config.ignores_unknown_fields or not self.config.strict_tools
        if problem := form.tool_problem(self.shows_tools or is_lenient):
            raise ApiError(400, problem, "tool_choice")
        if form.may_call and not self.shows_tools:
            log.warning(f"{self.model_name} {SEES_NO_TOOLS}")
        max_tokens = form.max_completion_tokens or form.max_tokens
        return await self._converse(Chat, max_tokens, form, request)

    @route("/v1/responses", "POST")
    async def responses(self, form: ResponsesRequest, request: Request) -> Response:
        """Answer a text or messages, as /v1/chat/completions does."""
        if form.tools and form.tool_choice != "none":
            if self.config.strict_tools or self.shows_tools:
                raise ApiError(400, f"tools are not shown to the model here: {CHAT_TOOLS}.", "tools")
            log.warning(f"{self.model_name} {SEES_NO_TOOLS}")
        return await self._converse(Responses, form.max_tokens, form, request)

    @route("/generate", "POST")
    async def generate(self, form: protocol.GenerateRequest, request: Request) -> Response:
        """Continue one prompt as LLM.submit does, for RemoteLLM."""
        prompts = await self.read_prompts(form.prompt, form, request)
        fields = {"max_tokens": form.max_tokens, "logprobs": form.logprobs}
        return await self._answer(await self._job(Generation, prompts, form, request, **fields), request)

    async def _converse(
        self, kind: type[Job], max_tokens: int | None, form: Any, request: Request
    ) -> Response:
        """Answer the messages of a form by the chat template."""
        if self.chat_template is None:
            how = "start the server with --chat-template plain, or a file, or use /v1/completions"
            raise ApiError(400, f"{self.model_name} has no chat template: {how}.", code="no_chat_template")
        options = form.template_options(self.shows_tools) if kind is Chat else None
        adds_prompt = getattr(form, "add_generation_prompt", None) is not False
        read = partial(chat_ids, self.chat_template, self.llm.tokenizer, form.listed_messages())
        ids = await asyncio.to_thread(read, options, adds_prompt)
        prompts = self._shortened(form, await self.read_prompts([ids], form, request), max_tokens)
        max_tokens = self._max_tokens(form, prompts, max_tokens, self.llm.max_model_len)
        job = await self._job(kind, prompts, form, request, max_tokens=max_tokens)
        return await self._answer(job, request)

    async def _job(
        self, kind: type[JobKind], prompts: list[Prompt], form: Any, request: Request, **fields: Any
    ) -> JobKind:
        """Return the checked request. fields: of SamplingParams, beside those of the form."""
        params = await self._params(form, request, **fields)
        head = {
            "id": kind.id_prefix + secrets.token_hex(16),
            "object": kind.event_object if form.stream else kind.reply_object,
            "created": int(time.time()),
            "model": form.model or self.model_name,
            "system_fingerprint": f"tinygpt-{tinygpt.__version__}-{self.llm.dtype}",
        }
        return kind(head, form, prompts, params, self.names)

    async def _answer(self, job: Job, request: Request) -> Response:
        """Reply with a job's outputs, whole or as events."""
        size = self._reply_bytes(job) + BYTES_OF_PROMPT * len(request._body)
        make = partial(self._requests, [(prompt, job.params) for prompt in job.prompts])
        write = self.turns.in_one_thread if job.params.capture else in_slices
        with ExitStack() as stack:
            stack.enter_context(self.turns.holding(size))
            if job.form.stream:
                work = await self._start(make, True, request, job.params)
                stack.callback(self._end, request, work)
                return EventStream(job, work, write, stack.pop_all().close)
            outputs = await self.run(make, request, job.params)
            return await json_reply(job.record(outputs), write)

    def _reply_bytes(self, job: Job) -> int:
        """Return the most bytes of a reply's log probabilities and arrays. Raise ApiError for too many."""
        # The operator's limit holds for a sample of the model's length.
        limit = max(MAX_LOGPROBS, (self.config.max_logprobs + 1) * self.llm.max_model_len)
        if job.num_logprobs > limit:
            fields = ("prompt_logprobs", "top_logprobs", "logprobs")
            field = next(name for name in fields if getattr(job.form, name, None) is not None)
            asked = f"{field} asks for {job.num_logprobs} log probabilities, of all tokens of all samples together"
            message = f"{asked}; this server gives at most {limit} in a reply: split the request."
            raise ApiError(400, message, field)
        size = job.logprob_bytes
        if job.params.capture or job.params.edits:
            longest = max(len(prompt.token_ids) for prompt in job.prompts)
            count = len(job.prompts) * job.params.num_samples
            length = longest + max(job.params.max_tokens - 1, 0)
            captures = self.llm._inputs.captures(job.params.capture, (), longest, length, count)
            size += count * captures.num_bytes(length)
        return size

    async def run(
        self,
        make: Make,
        request: Request,
        params: SamplingParams | None = None,
        is_admitted: bool = False,
    ) -> list[Any]:
        """Return the outputs of the engine's requests that `make` returns. params: as in `thread_for`."""
        work = await self._start(make, False, request, params, is_admitted)
        try:
            return await work.outputs()
        finally:
            self._end(request, work)

    async def read_all(self, make: Callable[[], list[EngineRequest]], request: Request) -> list[Any]:
        """Return the results of requests that read prompts, of any number: as many wait at once as run together."""
        left = await read_apart(request, make)
        count = self.llm.engine.engine_config.max_num_seqs
        results = []
        while left:
            some, left = left[:count], left[count:]
            results += await self.run(lambda _, some=some: some, request, is_admitted=bool(results))
        return results

    async def _start(
        self,
        make: Make,
        stream: bool,
        request: Request,
        params: SamplingParams | None,
        is_admitted: bool = False,
    ) -> RunningRequest:
        self.check_open()
        work = RunningRequest(Outbox.of(self.llm), stream)
        self._running.add(work)

        def submit(on_chunk: ToCall) -> list[ThreadFuture]:
            futures = [*map(RequestFuture, make(on_chunk))]
            self.llm.engine.submit_queued(futures, is_admitted)  # all, or none
            return futures

        await work.begin(submit, self.turns.thread_for(request, params))
        return work

    def _requests(self, pairs: list[Pair], on_chunk: ToCall) -> list[EngineRequest]:
        """Raise LLM.submit's errors, before any sequence is made if there are too many."""
        sizes = self.llm.engine.engine_config
        count = sum(params.num_samples for _, params in pairs)
        if sizes.max_queue is not None and count > (room := sizes.max_queue + sizes.max_num_seqs):
            message = f"the request asks for {count} samples; this server takes {room} at most: split it."
            raise ApiError(400, message)
        return [self.llm._single_request(*pair, on_chunk(i)) for i, pair in enumerate(pairs)]

    def _end(self, request: Request, work: RunningRequest) -> None:
        ended = work.finish()
        self.metrics.observe(ended, work.token_gaps())
        firsts = [progress.metrics.time_to_first_token for progress, _ in ended]
        notes = request.state.notes  # also of earlier prompts of the body
        earlier = notes.get("prompt_tokens", 0)
        notes |= {
            "prompt_tokens": earlier + sum(progress.num_prompt_tokens for progress, _ in ended),
            "completion_tokens": sum(progress.num_new_tokens for progress, _ in ended),
            "queue": round(max((progress.metrics.queue_time for progress, _ in ended), default=0.0), 6),
            "ttft": min((round(first, 6) for first in firsts if first is not None), default=None),
            "finish": ",".join(sorted({reason for _, reasons in ended for reason in reasons})),
        }

    def stop_all(self) -> None:
        """End all work; each client is told why."""
        reason = "the server was shut down before this was finished: ask again."
        self.turns.shutdown_error = ApiError(503, reason, code="shutting_down")
        for work in list(self._running):
            work.cancel(self.turns.shutdown_error)

    def encode(self, text: str) -> list[int]:
        return encode(text, self.llm.tokenizer, self.llm.config.vocab_size, split_special_tokens=True)

    async def read_prompts(
        self, prompts: Any, form: Any, request: Request, field: str = "prompt"
    ) -> list[Prompt]:
        """Return the prompts of a text, token ids, or a list of either. field: its name in the request."""
        self.check_open()
        is_split = form.split_special_tokens is not False

        def read() -> list[Prompt]:
            return [self.llm.read_prompt(prompt, is_split) for prompt in listed(prompts)]

        try:
            return await read_apart(request, read)
        except (RequestError, NoTokenizerError) as error:
            raise ApiError(400, str(error), field) from None

    async def _params(self, form: protocol.SamplingFields, request: Request, **others: Any) -> SamplingParams:
        if form.model in self.llm.lora_modules:
            others["lora_request"] = form.model

        def read() -> SamplingParams:
            looks = form.look_params(self.config.look, self.config.control_vectors)
            params = form.sampling_params(self.encode, **others, **looks)
            request.state.notes["edits"] = f"{salt_of(params.edits, 0):016x}" if params.edits else None
            return params

        params = await read_apart(request, read)
        await request.state.reading.aclose()
        return params

    def _shortened(self, form: Any, prompts: list[Prompt], max_tokens: int | None) -> list[Prompt]:
        """Return the last tokens of each prompt, or the first, if the form bounds their number."""
        count = getattr(form, "truncate_prompt_tokens", None)
        if count is None:
            return prompts
        if count == FILLING:
            virtual = self.llm.num_virtual_tokens(form.soft_prompt)
            count = max(self.llm.max_model_len - virtual - max(max_tokens or 1, 1), 1)
        kept = slice(count) if form.truncation_side == "right" else slice(-count, None)
        return [p if len(p.token_ids) <= count else Prompt(None, p.token_ids[kept]) for p in prompts]

    def _max_tokens(self, form: Any, prompts: list[Prompt], max_tokens: int | None, most: int) -> int:
        """Return `max_tokens`, or else the room after the longest prompt up to `most`. ApiError if it does not fit."""
        limit = self.llm.max_model_len
        num_virtual = self.llm.num_virtual_tokens(form.soft_prompt)
        read = num_virtual + max(len(prompt.token_ids) for prompt in prompts)
        if max_tokens in (None, FILLING):
            max_tokens = max(min(limit - read, most), 1)
        total = read + max_tokens
        if total > limit and form.overflow in (None, "refuse"):
            asked = f"{total} were asked for: {read} in the prompt and {max_tokens} to generate"
            field = form.name_of("max_tokens" if read < limit else "prompt")
            raise self.too_long(asked, field)
        return max_tokens

    def too_long(self, asked: str, field: str) -> ApiError:
        message = f"this model's context has {self.llm.max_model_len} tokens, and {asked}."
        return ApiError(400, message, field, "context_length_exceeded")

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            listed = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist: this server has {listed}."
            raise ApiError(404, message, "model", "model_not_found")

    def check_open(self) -> None:
        if self.is_draining:  # the next connection may reach another server
            raise ApiError(503, "the server is shutting down: try again later.", **RETRY, connection="close")

    async def _first_logprobs(self) -> dict[int, float] | None:
        """Return log probabilities of all tokens after BOS alone, computed once; None without a BOS token."""
        bos = self.llm.config.bos_token_id
        if self._first is None and bos is not None:
            params = SamplingParams(max_tokens=0, prompt_logprobs=-1)
            output = await asyncio.wrap_future(self.llm.submit(Prompt(None, [bos, bos]), params))
            self._first = output.prompt_logprobs[1]
        return self._first


def listed(prompts: Any) -> list[Any]:
    """Return the prompts of a text, a list of ids, or a list of either."""
    return prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts or ""]
