"""RemoteLLM: an LLM whose model runs behind a server."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, as_completed
from typing import Any

from tinygpt.errors import RequestError, ServerError
from tinygpt.outputs import RequestOutput, StreamChunk
from tinygpt.remote.connections import Connections, Exchange
from tinygpt.remote.wire import PATH, chunk_from_json, output_from_json, params_to_json
from tinygpt.request.prompts import Prompt, checked_ids, checked_salt, params_list, prompt_list, unsalted
from tinygpt.sampling_params import SamplingParams

KEY_VARIABLE = "TINYGPT_API_KEY"


class RemoteLLM:
    """The face of an LLM, before a model that `tinygpt serve` runs: `generate`, `stream` and `submit` give
    what they give in an LLM, to the bit. For asyncio there is AsyncLLM(RemoteLLM(url)).

    url: the server's address.
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

    def generate(self, prompts: Any, params: Any = None) -> list[RequestOutput]:
        """Continue each prompt, as LLM.generate does. The first that is refused ends all."""
        outputs = dict(self.generate_as_finished(prompts, params))
        return [outputs[i] for i in sorted(outputs)]

    def generate_as_finished(self, prompts: Any, params: Any = None) -> Iterator[tuple[int, RequestOutput]]:
        """As `generate`, but yields (index of the prompt, output) as soon as each is finished."""
        prompts = prompt_list(prompts)
        pairs = zip(prompts, params_list(params, len(prompts)), strict=True)
        calls = [_Call(self._connections, *self._request(prompt, p)) for prompt, p in pairs]
        return self._run(calls)

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Continue one prompt, token by token, as LLM.stream does. Closing the iterator ends the request."""
        self._check_open()
        _, body = self._request(prompt, params)
        exchange = self._connections.exchange()
        exchange.send("POST", PATH, {**body, "stream": True})
        return _chunks(exchange)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        on_chunk: Callable[[StreamChunk], None] | None = None,
    ) -> "Future[RequestOutput]":
        """Continue one prompt while the caller does something else, as LLM.submit does.

        on_chunk: called with each StreamChunk, by a thread of its own. What the server refuses, the future raises.
        """
        if on_chunk is not None and not callable(on_chunk):
            raise RequestError(f"on_chunk is {on_chunk!r} and must be a function of one StreamChunk.")
        return self._start(_Call(self._connections, *self._request(prompt, params), on_chunk))

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

    def _run(self, calls: "list[_Call]") -> Iterator[tuple[int, RequestOutput]]:
        indices = {self._start(call): i for i, call in enumerate(calls)}
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
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
        if isinstance(prompt, Prompt):
            given, salt = (prompt.token_ids if prompt.text is None else prompt.text), prompt.cache_salt
        else:
            given, salt = unsalted(prompt, self._cache_salt)
        text = given if isinstance(given, str) else None
        body = {
            "prompt": (checked_ids(given) or None) if text is None else text,
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
        with _understood():
            return output_from_json(found, self._text, self._arrival)


def _chunks(exchange: Exchange) -> Iterator[StreamChunk]:
    with exchange:
        for event in exchange.events():
            if "chunk" in event:
                yield _chunk(event["chunk"])


def _chunk(found: Any) -> StreamChunk:
    with _understood():
        return chunk_from_json(found)


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            "the server's reply is none that this version reads: are both ends the same version?"
        ) from error


def _card_of(connections: Connections) -> dict[str, Any]:
    """The model that the server has; ServerError if it is no server of ours."""
    try:
        card = connections.get("/v1/models")["data"][0]
        if card["owned_by"] == "tinygpt":
            return card
    except (LookupError, TypeError):
        pass
    raise ServerError(f"{connections.url} is no tinygpt server: for one of another kind, use OpenAI's client.")
