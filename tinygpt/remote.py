"""RemoteLLM: an LLM whose model runs in a `tinygpt serve` process. Imports neither NumPy nor Numba."""

import asyncio
import base64
import json
import os
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from operator import index
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

from .engine.prompts import (
    Prompt,
    Prompts,
    PromptType,
    checked_ids,
    params_list,
    prompt_list,
)
from .errors import (
    OfOneProcess,
    QueueFullError,
    RequestError,
    ServerError,
    TinyGPTError,
    closed,
    how_to_install,
)
from .front import Front
from .outputs import (
    ContinuationScore,
    OnChunk,
    RequestOutput,
    StreamChunk,
    ThreadFuture,
    as_finished,
    check_thread,
    has_threads,
    until_done,
)
from .sampling_params import SamplingParams
from .text import TextEncoder
from .wire import (
    MALFORMED,
    checked_text,
    output_from_json,
    params_to_json,
    read_reply,
    record_from_json,
)

if TYPE_CHECKING:
    import httpx
    import numpy as np


KEY_VARIABLE = "TINYGPT_API_KEY"
BUSY = (429, 503)  # statuses of a server that has not begun the request
FIRST_WAIT, MAX_WAIT = 0.5, 30.0  # seconds between tries; the first doubles each time
KEEPALIVE_SECONDS = 20.0  # less than the server's, so that a connection is not closed during a request
MAX_CONTINUATIONS = 256  # of one HTTP request
OWNER = "RemoteLLM"

Result = TypeVar("Result")


class RemoteLLM(Front[ThreadFuture[RequestOutput], TinyGPTError]):
    """An LLM in a server: all methods return the same bits as in an LLM. Thread-safe. A forked child makes its own.

    url: the server's address, with or without /v1. api_key: None is the variable TINYGPT_API_KEY.
    timeout: seconds of silence after which a request fails.
    max_connections: requests of `generate` and `submit` that run at once; more wait here.
    max_retries: retries after a refused connection, status 429 or 503. Nothing else is sent again.
    split_special_tokens: as in LLM.
    Raise ServerError if the server cannot be reached, needs another key, or is no tinygpt server.
    """

    model: str
    max_model_len: int
    tokenizer: "RemoteTokenizer"

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        timeout: float = 600.0,
        max_connections: int = 32,
        max_retries: int = 3,
        split_special_tokens: bool = False,
    ):
        if max_connections < 1 or max_retries < 0 or timeout <= 0:
            raise RequestError(
                "max_connections must be 1 or more, max_retries 0 or more, and timeout above 0."
            )
        self._split_special_tokens = split_special_tokens
        self._server = _Server(
            url, api_key or os.environ.get(KEY_VARIABLE), timeout, max_connections, max_retries
        )
        self._end = finalize(self, self._server.end)
        try:
            self.model, self.max_model_len = self._server.ask("/v1/models", _card)
        except BaseException:
            self.close()
            raise
        self.tokenizer = RemoteTokenizer(self._server, split_special_tokens)

    def read_prompt(self, prompt: PromptType, split_special_tokens: bool | None = None) -> Prompt:
        """Return a prompt as LLM.read_prompt does; the server encodes a text."""
        if isinstance(prompt, str):
            return Prompt(prompt, self.tokenizer.encode(prompt, split_special_tokens))
        return prompt if isinstance(prompt, Prompt) else Prompt(None, checked_ids(prompt))

    def _generate(
        self, pairs: Iterable[tuple[PromptType, SamplingParams]], return_exceptions: bool
    ) -> Iterator[tuple[int, RequestOutput | TinyGPTError]]:
        requests = [self._request(*pair) for pair in pairs]
        futures = [ThreadFuture(OWNER) for _ in requests]

        def begin() -> None:
            for future, request in zip(futures, requests, strict=True):
                self._server.begin(future, self._server.generate, *request)

        return as_finished(futures, begin, return_exceptions, TinyGPTError)

    def _stream(self, prompt: PromptType, params: SamplingParams | None) -> Iterator[StreamChunk]:
        request = self._request(prompt, params)
        chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()
        future = self._server.start(self._server.stream, *request, chunks.put)
        future.add_done_callback(lambda _: chunks.put(None))
        try:
            chunks.get()  # None: the server has accepted the request, or the future is done
            if future.done() and chunks.empty():  # or chunks that came are given before its error
                future.result()
        except BaseException:  # Ctrl-C
            future.cancel()
            raise
        return until_done(chunks, future)

    def _submit(
        self, prompt: PromptType, params: SamplingParams | None, on_chunk: OnChunk | None
    ) -> ThreadFuture[RequestOutput]:
        return self._server.start(self._server.generate, *self._request(prompt, params), on_chunk)

    def score(
        self,
        prompt: PromptType,
        continuations: Prompts,
        soft_prompt: str | None = None,
        split_special_tokens: bool | None = None,
        edits: Any = (),
    ) -> list[ContinuationScore]:
        """Return log probabilities of continuations, as LLM.score does. Edits are refused."""
        params_to_json(SamplingParams(edits=edits))
        is_split = self._split_special_tokens if split_special_tokens is None else split_special_tokens
        body = {
            "prompt": _sendable(prompt) or None,
            "split_special_tokens": is_split,
            "soft_prompt": soft_prompt,
        }

        def scores(reply: Any) -> list[ContinuationScore]:
            return [record_from_json(ContinuationScore, score) for score in reply["scores"]]

        listed = [*map(_sendable, prompt_list(continuations))]
        all_scores = []
        for start in range(0, len(listed), MAX_CONTINUATIONS):
            body["continuations"] = listed[start : start + MAX_CONTINUATIONS]
            all_scores += self._server.ask("/score_continuations", scores, body)
        return all_scores

    def embed(self, prompts: Prompts, pooling: str = "last") -> "np.ndarray":
        """Return (len(prompts), C) float32, as LLM.embed does."""
        import numpy as np

        def vector(reply: Any) -> np.ndarray:
            data = base64.b64decode(reply["data"][0]["embedding"], validate=True)
            return np.frombuffer(data, "<f4")  # (C,)

        vectors = []
        for prompt in prompt_list(prompts):
            body = {"input": _sendable(prompt), "pooling": pooling, "encoding_format": "base64"}
            body["split_special_tokens"] = self._split_special_tokens
            vectors.append(self._server.ask("/v1/embeddings", vector, body))
        if not vectors:
            return self.embed([[0]])[:0]  # has the right width
        return read_reply(np.stack, vectors).astype(np.float32)

    def close(self) -> None:
        """Fail pending futures and all later calls with RequestError."""
        self._end()

    def _request(
        self, prompt: PromptType, params: SamplingParams | None
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the prompt's text, if it is one, and the body."""
        [checked] = params_list(params, 1)
        text = prompt.text if isinstance(prompt, Prompt) else prompt if isinstance(prompt, str) else None
        fixed = {"prompt": _sendable(prompt) or None, "split_special_tokens": self._split_special_tokens}
        return text, fixed | params_to_json(checked)


class RemoteTokenizer(OfOneProcess, TextEncoder):
    """encode, decode and call of a Tokenizer, each an HTTP request."""

    def __init__(self, server: "_Server", split_special_tokens: bool):
        self._server = server
        self.split_special_tokens = split_special_tokens

    def encode(self, text: str, split_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text. split_special_tokens: as in LLM; None is the RemoteLLM's."""
        if not isinstance(text, str):
            raise RequestError(f"a text to encode must be a string; {type(text).__name__} was given.")
        is_split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        body = {"prompt": text, "split_special_tokens": is_split}
        return self._server.ask("/tokenize", lambda reply: checked_ids(reply["tokens"]), body)

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        body = {"tokens": checked_ids(ids), "skip_special_tokens": skip_special_tokens}
        return self._server.ask("/detokenize", lambda reply: checked_text(reply["prompt"]), body)


class _Server:
    """An httpx client of one server, in the event loop of a thread, so that futures can be cancelled."""

    def __init__(self, url: str, api_key: str | None, timeout: float, max_connections: int, max_retries: int):
        try:
            import httpx
        except ImportError:
            raise RequestError(
                f"RemoteLLM needs httpx, which comes with: {how_to_install('remote')}."
            ) from None
        self.url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        self._httpx = httpx
        self._timeout = timeout
        self._max_retries = max_retries
        self._has_key = api_key is not None
        try:
            parts = httpx.URL(self.url)
            is_url = parts.scheme in ("http", "https") and parts.host and not (parts.query or parts.fragment)
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise RequestError(f"url is {url!r} and must be a server's, such as http://127.0.0.1:8000.")
        if self._has_key and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("api_key must be printable ASCII.")
        key = {"authorization": f"Bearer {api_key}"} if self._has_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"content-type": "application/json", **key},
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
            verify=ssl.create_default_context(),
            trust_env=False,  # no proxy of the environment
        )
        self._pid = os.getpid()
        self._is_closed = False
        self._lock = threading.Lock()
        self._turn = asyncio.Semaphore(max_connections)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run_loop, args=(self._loop,), name="tinygpt-remote", daemon=True).start()

    def start(
        self, work: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any
    ) -> ThreadFuture[Result]:
        """Run a coroutine in the loop. Cancelling the future closes the connection, which frees the server's slots."""
        future = ThreadFuture(OWNER)
        self.begin(future, work, *arguments)
        return future

    def begin(self, future: ThreadFuture, work: Callable[..., Coroutine], *arguments: Any) -> None:
        def run() -> None:
            task = self._loop.create_task(self._guarded(work(*arguments)))
            task.add_done_callback(lambda task: future.settle(task.result))
            future.add_done_callback(lambda future: future.cancelled() and self._cancel(task))

        check_thread(self._pid, OWNER)
        with self._lock:
            if self._is_closed:
                raise closed(OWNER)
            self._loop.call_soon_threadsafe(run)

    def ask(self, path: str, parse: Callable[[Any], Result], body: Any = None) -> Result:
        """body: None is GET."""
        future = self.start(self._answer, path, parse, body)
        try:
            return future.result()
        finally:
            future.cancel()

    def end(self) -> None:
        if not has_threads(self._pid):
            return
        with self._lock:
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).add_done_callback(
            lambda _: self._loop.stop()
        )

    async def generate(self, text: str | None, body: dict, on_chunk: Any = None) -> RequestOutput:
        read = partial(output_from_json, prompt=text, arrival=time.perf_counter())
        async with self._turn:
            if on_chunk is None:
                return await self._answer("/generate", read, body)
            return await self.stream(text, body, lambda chunk: None if chunk is None else on_chunk(chunk))

    async def stream(self, text: str | None, body: dict, on_chunk: Callable[[Any], Any]) -> RequestOutput:
        """Return the output. on_chunk gets None when the server accepts the request, then each chunk in a thread."""
        read = partial(output_from_json, prompt=text, arrival=time.perf_counter())
        output = None
        async with self._opened("/generate", body | {"stream": True}) as response:
            on_chunk(None)
            async for line in response.aiter_lines():
                event = read_reply(json.loads, line[6:]) if line.startswith("data: {") else {}
                if "error" in event:
                    message = read_reply(lambda event: checked_text(event["error"]["message"]), event)
                    raise ServerError(f"{self.url} has ended the request: {message}")
                if "chunk" in event:
                    await asyncio.to_thread(
                        on_chunk, read_reply(partial(record_from_json, StreamChunk), event["chunk"])
                    )
                elif "output" in event:
                    output = read_reply(read, event["output"])
        if output is None:
            raise ServerError(f"{self.url} has ended its reply too early: is it still running?")
        return output

    async def _answer(self, path: str, parse: Callable[[Any], Result], body: Any) -> Result:
        async with self._opened(path, body) as response:
            text = await response.aread()
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise ServerError(f"{self.url} is no tinygpt server: it does not speak JSON.") from None
        return read_reply(parse, reply)

    @asynccontextmanager
    async def _opened(self, path: str, body: Any) -> "AsyncIterator[httpx.Response]":
        """Yield an open response with status 200. body: None is GET, which is sent once."""
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        request = self._client.build_request("GET" if body is None else "POST", path, content=content)
        waits = [] if body is None else [FIRST_WAIT * 2**i for i in range(self._max_retries)]
        try:
            for wait in (*waits, None):
                try:
                    response = await self._client.send(request, stream=True)
                except self._httpx.ConnectError:
                    if wait is None:
                        raise
                else:
                    if response.status_code == 200:
                        break
                    await response.aread()
                    if wait is None or response.status_code not in BUSY:
                        raise self._refusal(response)
                    told = response.headers.get("retry-after", "")
                    wait = min(float(told), MAX_WAIT) if told.isdecimal() else wait
                await asyncio.sleep(wait)
            async with aclosing(response):
                yield response
        except self._httpx.HTTPError as error:
            raise self._lost(error) from error

    async def _guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_closed:
                raise closed(OWNER) from None
            raise

    def _cancel(self, task: asyncio.Task) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(task.cancel)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _lost(self, error: Exception) -> ServerError:
        if isinstance(error, self._httpx.TimeoutException):
            return ServerError(
                f"{self.url} has said nothing for {self._timeout:g} s: raise timeout, or look at it."
            )
        why = str(error) or type(error).__name__
        return ServerError(
            f"{self.url} does not answer ({why}): start it with `tinygpt serve`, or check the address."
        )

    def _refusal(self, response: "httpx.Response") -> TinyGPTError:
        status = response.status_code
        try:
            error = response.json()["error"]
            message = checked_text(error["message"])
            code = error["code"]
        except MALFORMED:
            return ServerError(f"{self.url} is no tinygpt server: it answers with status {status}.")
        if status == 401:
            wanted = "another API key than the one given" if self._has_key else "an API key"
            return ServerError(f"{self.url} wants {wanted}: set api_key, or the variable {KEY_VARIABLE}.")
        if status == 404 and code != "model_not_found":
            return ServerError(f"{self.url} is no tinygpt server, or an older one: {message}")
        if status == 429:
            return QueueFullError(message)
        is_request = status in (400, 404, 413)
        return RequestError(message) if is_request else ServerError(f"{self.url} refuses: {message}")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _card(reply: Any) -> tuple[str, int]:
    card = reply["data"][0]
    if card["owned_by"] != "tinygpt":
        raise ServerError("the server is no tinygpt server: for one of another kind, use OpenAI's client.")
    return checked_text(card["id"]), index(card["max_model_len"])


def _sendable(prompt: Any) -> str | list[int]:
    prompt = prompt.token_ids if isinstance(prompt, Prompt) else prompt
    return prompt if isinstance(prompt, str) else checked_ids(prompt)
