"""RemoteLLM: an LLM whose model runs behind a server."""

import base64
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from tinygpt.errors import RequestError, ServerError, TinyGPTError
from tinygpt.outputs import ContinuationScore, RequestOutput, StreamChunk
from tinygpt.progress_bar import UseTqdm, with_bar
from tinygpt.remote.connections import Connections, Exchange
from tinygpt.remote.remote_tokenizer import RemoteTokenizer
from tinygpt.remote.wire import (
    PATH,
    SCORE_PATH,
    chunk_from_json,
    output_from_json,
    params_to_json,
    score_from_json,
    understood,
)
from tinygpt.request.prompts import (
    Prompt,
    checked_ids,
    checked_salt,
    params_list,
    params_or_fields,
    prompt_list,
    unsalted,
)
from tinygpt.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

KEY_VARIABLE = "TINYGPT_API_KEY"
MAX_CONTINUATIONS = 256  # of one request
_INSIDE = "what it reads is inside the model, and a server gives no tensors: use an LLM"
# What an LLM has and this has not, and why.
ELSEWHERE = {
    "attentions": _INSIDE,
    "check_health": "GET /health asks the server",
    "hidden_states": _INSIDE,
    "logits": f"{_INSIDE}; logprobs and prompt_logprobs are there",
    "num_truncated_tokens": "outputs tell their num_truncated_tokens",
    "num_virtual_tokens": "the server counts them",
    "session": "a session's keys and values lie in the memory of an LLM: use one; prompts that begin alike share that "
    "over there anyway",
    "step": "the server takes the steps",
}


class RemoteLLM:
    """The face of an LLM, before a model that `tinygpt serve` runs: `generate`, `stream`, `submit`, `score` and `embed`
    give what they give in an LLM, to the bit. For asyncio there is AsyncLLM(RemoteLLM(url)).

    url: the server's address; a /v1 at its end, as OpenAI's clients are given, is left out.
    api_key: what the server wants to be sent; None is the variable TINYGPT_API_KEY, if there is one.
    timeout: seconds that the server may be silent before a request ends with a ServerError.
    max_connections: requests of `generate` and `submit` that are under way at once; more wait here.
    max_retries: how often a request is sent again that the server has certainly not begun, because it refused the
        connection, or said that it is busy or shutting down. Of the rest, only what met a connection that the server
        had closed while nothing was on it is sent again, once.
    split_special_tokens, cache_salt: as LLM's.

    Raises ServerError if the server cannot be reached, wants another key, or is none of tinygpt's. Several threads may
    use one RemoteLLM. A request's times are the server's, without the way there.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        timeout: float = 600.0,
        max_connections: int = 32,
        max_retries: int = 3,
        split_special_tokens: bool = False,
        cache_salt: str | None = None,
    ):
        if max_connections < 1 or max_retries < 0 or timeout <= 0:
            raise RequestError(
                f"max_connections={max_connections}, max_retries={max_retries} and timeout={timeout} must be 1 or "
                "more, 0 or more, and above 0."
            )
        self._split_special_tokens, self._cache_salt = split_special_tokens, checked_salt(cache_salt)
        self._connections = Connections(url, api_key or os.environ.get(KEY_VARIABLE), timeout, max_retries)
        card = _card_of(self._connections)
        self.model, self.max_model_len = card["id"], card["max_model_len"]
        self._threads = ThreadPoolExecutor(max_connections, thread_name_prefix="tinygpt-remote")
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._is_closed = False

    @property
    def tokenizer(self) -> RemoteTokenizer:
        """The tokenizer over there: each call of its methods is a request."""
        self._check_open()
        return RemoteTokenizer(self._connections, self._split_special_tokens)

    def read_prompt(self, prompt: Any, split_special_tokens: bool | None = None) -> Prompt:
        """A text or token ids, encoded once, as LLM.read_prompt does; BOS for an empty one is added over there."""
        given, salt = unsalted(prompt, self._cache_salt)
        if not isinstance(given, str):
            return Prompt(None, checked_ids(given), salt)
        return Prompt(given, self.tokenizer.encode(given, split_special_tokens), salt)

    def generate(
        self, prompts: Any, params: Any = None, *, use_tqdm: UseTqdm = None, **fields: Any
    ) -> list[RequestOutput]:
        """Continue each prompt, as LLM.generate does. The first that is refused ends all."""
        prompts = prompt_list(prompts)
        finished = self.generate_as_finished(prompts, params, **fields)
        outputs = dict(with_bar(finished, len(prompts), use_tqdm))
        return [outputs[i] for i in sorted(outputs)]

    def generate_as_finished(
        self, prompts: Any, params: Any = None, *, return_exceptions: bool = False, **fields: Any
    ) -> Iterator[tuple[int, RequestOutput | TinyGPTError]]:
        """As `generate`, but yields (index of the prompt, output) as soon as each is finished.

        return_exceptions: in place of an output, yield what came of a prompt instead: a refusal of the server among it,
            which an LLM would have raised before any work.
        """
        prompts, params = prompt_list(prompts), params_or_fields(params, fields)
        pairs = zip(prompts, params_list(params, len(prompts)), strict=True)
        calls = [_Call(self._connections, *self._request(prompt, p)) for prompt, p in pairs]
        return self._run(calls, return_exceptions)

    def stream(self, prompt: Any, params: SamplingParams | None = None, **fields: Any) -> Iterator[StreamChunk]:
        """Continue one prompt, token by token, as LLM.stream does. Closing the iterator ends the request."""
        self._check_open()
        _, body = self._request(prompt, params_or_fields(params, fields))
        exchange = self._connections.exchange()
        exchange.send("POST", PATH, {**body, "stream": True})
        return _chunks(exchange)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        on_chunk: Callable[[StreamChunk], None] | None = None,
        **fields: Any,
    ) -> "Future[RequestOutput]":
        """Continue one prompt while the caller does something else, as LLM.submit does.

        on_chunk: called with each StreamChunk, by a thread of its own. What the server refuses, the future raises.
        """
        if on_chunk is not None and not callable(on_chunk):
            raise RequestError(f"on_chunk is {on_chunk!r} and must be a function of one StreamChunk.")
        request = self._request(prompt, params_or_fields(params, fields))
        return self._start(_Call(self._connections, *request, on_chunk))

    def score(
        self,
        prompt: Any,
        continuations: Any,
        soft_prompt: str | None = None,
        split_special_tokens: bool | None = None,
    ) -> list[ContinuationScore]:
        """How probable each continuation of the prompt is, as LLM.score says."""
        self._check_open()
        given, salt = unsalted(prompt, self._cache_salt)
        body = {
            "prompt": _sendable(given) or None,
            "split_special_tokens": self._split_special_tokens
            if split_special_tokens is None
            else split_special_tokens,
            **{name: value for name, value in {"soft_prompt": soft_prompt, "cache_salt": salt}.items() if value},
        }
        listed, found = [*map(_sendable, prompt_list(continuations))], []
        for start in range(0, len(listed), MAX_CONTINUATIONS):
            part = {**body, "continuations": listed[start : start + MAX_CONTINUATIONS]}
            reply = self._connections.post(SCORE_PATH, part)
            with understood():
                found += map(score_from_json, reply["scores"])
        return found

    def embed(self, prompts: Any, pooling: str = "last") -> "np.ndarray":
        """A vector for each text or list of token ids, (len(prompts), C) float32, as LLM.embed makes them.

        One request for each, so that the first which is refused may have others before it. An array needs NumPy.
        """
        import numpy as np

        self._check_open()
        vectors = []
        for prompt in prompt_list(prompts):
            body = {
                "input": _sendable(unsalted(prompt, None)[0]),
                "pooling": pooling,
                "encoding_format": "base64",
                "split_special_tokens": self._split_special_tokens,
            }
            reply = self._connections.post("/v1/embeddings", body)
            with understood():
                vectors.append(np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4"))  # (C,)
        return np.stack(vectors).astype(np.float32) if vectors else self.embed([[0]])[:0]  # which is as wide

    def close(self) -> None:
        """Any later call raises RequestError, and so does every future that is not done."""
        with self._lock:
            self._is_closed = True
            calls = [*self._calls]
        for call in calls:
            call.fail(RequestError(_CLOSED))
        self._threads.shutdown(cancel_futures=True)
        self._connections.close()

    def __enter__(self) -> "RemoteLLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        why = ELSEWHERE.get(name, "it is no part of a RemoteLLM")
        raise AttributeError(f"{type(self).__name__} has no {name}: {why}.")

    def _run(self, calls: "list[_Call]", return_exceptions: bool) -> Iterator[tuple[int, RequestOutput | TinyGPTError]]:
        indices = {self._start(call): i for i, call in enumerate(calls)}
        try:
            for future in as_completed(indices):
                error = future.exception()
                is_returned = return_exceptions and isinstance(error, TinyGPTError)
                yield indices[future], error if is_returned else future.result()
        finally:
            for future in indices:
                future.cancel()

    def _start(self, call: "_Call") -> "Future[RequestOutput]":
        with self._lock:
            self._check_open()
            self._calls.add(call)
            call.future.add_done_callback(lambda _: self._calls.discard(call))
            self._threads.submit(call.run)
        return call.future

    def _request(self, prompt: Any, params: SamplingParams | None) -> tuple[str | None, dict[str, Any]]:
        """The prompt's text, if it is one, and what is sent."""
        [checked] = params_list(params, 1)
        given, salt = unsalted(prompt, self._cache_salt)
        text = prompt.text if isinstance(prompt, Prompt) else given if isinstance(given, str) else None
        body = {
            "prompt": _sendable(given) or None,
            "split_special_tokens": self._split_special_tokens,
            **params_to_json(checked),
        }
        return text, body if salt is None else {**body, "cache_salt": salt}

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError(_CLOSED)


_CLOSED = "this RemoteLLM has been closed: make another."


class _Call:
    """One request on its way, which its future stands for: cancelling that gives it up."""

    def __init__(
        self,
        connections: Connections,
        text: str | None,
        body: dict[str, Any],
        on_chunk: Callable[[StreamChunk], None] | None = None,
    ):
        self._exchange = connections.exchange()
        self._text, self._body, self._on_chunk = text, body, on_chunk
        self._arrival = time.perf_counter()
        self.future: Future[RequestOutput] = Future()
        self.future.add_done_callback(lambda _: self._exchange.give_up() if self.future.cancelled() else None)

    def run(self) -> None:
        if self.future.done():
            return
        try:
            with self._exchange:
                output = self._whole() if self._on_chunk is None else self._streamed()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # cancelled, or closed
                self.future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self.future.set_result(output)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
        self._exchange.give_up()

    def _whole(self) -> RequestOutput:
        self._exchange.send("POST", PATH, self._body)
        return self._output(self._exchange.json())

    def _streamed(self) -> RequestOutput:
        self._exchange.send("POST", PATH, {**self._body, "stream": True})
        output = None
        for event in self._exchange.events():
            if "chunk" in event:
                self._on_chunk(_chunk(event["chunk"]))
            else:
                output = self._output(event.get("output"))
        return output

    def _output(self, found: Any) -> RequestOutput:
        with understood():
            return output_from_json(found, self._text, self._arrival)


def _sendable(given: Any) -> str | list[int]:
    given = given.token_ids if isinstance(given, Prompt) else given
    return given if isinstance(given, str) else checked_ids(given)


def _chunks(exchange: Exchange) -> Iterator[StreamChunk]:
    with exchange:
        for event in exchange.events():
            if "chunk" in event:
                yield _chunk(event["chunk"])


def _chunk(found: Any) -> StreamChunk:
    with understood():
        return chunk_from_json(found)


def _card_of(connections: Connections) -> dict[str, Any]:
    """The model that the server has; ServerError if it is no server of ours."""
    try:
        card = connections.get("/v1/models")["data"][0]
        if card["owned_by"] == "tinygpt":
            return card
    except (LookupError, TypeError):
        pass
    raise ServerError(f"{connections.url} is no tinygpt server: for one of another kind, use OpenAI's client.")
