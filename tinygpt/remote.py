"""RemoteLLM: an LLM whose model runs behind `tinygpt serve`.

Nothing that computes is imported, neither NumPy nor Numba. `server/replies.py` writes what is read here.
"""

import asyncio
import base64
import json
import os
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import asdict, fields
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import finalize

from tinygpt.engine.prompts import Prompt, checked_ids, params_list, params_or_fields, prompt_list
from tinygpt.errors import QueueFullError, RequestError, ServerError, TinyGPTError, how_to_install
from tinygpt.field_rules import MAX_COUNT
from tinygpt.outputs import (
    CompletionOutput,
    ContinuationScore,
    RequestMetrics,
    RequestOutput,
    StreamChunk,
    UseTqdm,
    with_bar,
)
from tinygpt.sampling_params import ALL, SamplingParams

if TYPE_CHECKING:
    import httpx
    import numpy as np

KEY_VARIABLE = "TINYGPT_API_KEY"
BUSY = (429, 503)  # statuses of a server that has not begun the request
FIRST_WAIT, MAX_WAIT = 0.5, 30.0  # seconds between tries; the first doubles each time
KEEPALIVE_SECONDS = 20.0  # less than the server's, so that a connection is not closed during a request
MAX_CONTINUATIONS = 256  # of one HTTP request
ALWAYS_SENT = ("max_tokens", "temperature")  # their defaults are others in the server
UNSENDABLE = ("logits_processors", "prompt_embeds")
CLOSED = "this RemoteLLM has been closed: make another."


class RemoteLLM:
    """An LLM behind a server: generate, stream, submit, score and embed return the same bits as in an LLM.

    url: the server's address, with or without /v1 at its end.
    api_key: None is the variable TINYGPT_API_KEY.
    timeout: seconds of the server's silence after which a request fails.
    max_connections: requests of `generate` and `submit` that run at once; more wait here.
    max_retries: how often a request is sent again that the server has not begun: the connection was refused, or the
        status is 429 or 503. Nothing else is sent again.
    split_special_tokens: as in LLM.

    Raises ServerError if the server cannot be reached, needs another key, or is no tinygpt server. Thread-safe. The
    times of a request are the server's.
    """

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
            raise RequestError("max_connections must be 1 or more, max_retries 0 or more, and timeout above 0.")
        self._split_special_tokens = split_special_tokens
        self._server = _Server(url, api_key or os.environ.get(KEY_VARIABLE), timeout, max_connections, max_retries)
        finalize(self, self._server.end)
        try:
            card = _parsed(self._server.wait(self._server.get("/v1/models")), _card)
        except BaseException:
            self._server.end()
            raise
        self.model, self.max_model_len = card["id"], card["max_model_len"]
        self.tokenizer = RemoteTokenizer(self._server, split_special_tokens)

    def __repr__(self) -> str:
        return f"RemoteLLM({self._server.url!r}, model={self.model!r}, max_model_len={self.max_model_len})"

    def read_prompt(self, prompt: Any, split_special_tokens: bool | None = None) -> Prompt:
        """Return a text or token ids as LLM.read_prompt does; the server encodes the text."""
        if isinstance(prompt, str):
            return Prompt(prompt, self.tokenizer.encode(prompt, split_special_tokens))
        return prompt if isinstance(prompt, Prompt) else Prompt(None, checked_ids(prompt))

    def generate(
        self, prompts: Any, params: Any = None, *, use_tqdm: UseTqdm = None, **fields: Any
    ) -> list[RequestOutput]:
        """Continue each prompt, as LLM.generate does. The first refusal ends all."""
        prompts = prompt_list(prompts)
        finished = self.generate_as_finished(prompts, params, **fields)
        outputs = dict(with_bar(finished, len(prompts), use_tqdm))
        return [outputs[i] for i in sorted(outputs)]

    def generate_as_finished(
        self, prompts: Any, params: Any = None, *, return_exceptions: bool = False, **fields: Any
    ) -> Iterator[tuple[int, RequestOutput | TinyGPTError]]:
        """Yield (index of the prompt, output) as each finishes. return_exceptions: yield errors in place of outputs."""
        prompts, params = prompt_list(prompts), params_or_fields(params, fields)
        pairs = zip(prompts, params_list(params, len(prompts)), strict=True)
        return self._run([self._request(*pair) for pair in pairs], return_exceptions)

    def stream(self, prompt: Any, params: SamplingParams | None = None, **fields: Any) -> Iterator[StreamChunk]:
        """Continue one prompt, token by token, as LLM.stream does. Closing the iterator ends the request."""
        text, body = self._request(prompt, params_or_fields(params, fields))
        chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()
        future = self._server.start(self._server.generate(text, body, chunks.put, lambda: chunks.put(None)))
        future.add_done_callback(lambda _: chunks.put(None))
        chunks.get()  # the server has accepted the request, or the future is done
        if future.done():
            future.result()
        return _until_done(chunks, future)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        on_chunk: Callable[[StreamChunk], None] | None = None,
        **fields: Any,
    ) -> "Future[RequestOutput]":
        """Continue one prompt in the background, as LLM.submit does. The future raises the server's refusal.

        on_chunk: called with each StreamChunk, by another thread.
        """
        if on_chunk is not None and not callable(on_chunk):
            raise RequestError(f"on_chunk is {on_chunk!r} and must be a function of one StreamChunk.")
        return self._submit(*self._request(prompt, params_or_fields(params, fields)), on_chunk)

    def score(
        self,
        prompt: Any,
        continuations: Any,
        soft_prompt: str | None = None,
        split_special_tokens: bool | None = None,
    ) -> list[ContinuationScore]:
        """Return log probabilities of continuations, as LLM.score does."""
        is_split = self._split_special_tokens if split_special_tokens is None else split_special_tokens
        body = {"prompt": _sendable(prompt) or None, "split_special_tokens": is_split}
        body |= {} if soft_prompt is None else {"soft_prompt": soft_prompt}
        listed, found = [*map(_sendable, prompt_list(continuations))], []
        for start in range(0, len(listed), MAX_CONTINUATIONS):
            part = body | {"continuations": listed[start : start + MAX_CONTINUATIONS]}
            reply = self._server.wait(self._server.post("/score_continuations", part))
            found += _parsed(reply, lambda reply: [*map(_score, reply["scores"])])
        return found

    def embed(self, prompts: Any, pooling: str = "last") -> "np.ndarray":
        """Return a vector for each text or list of token ids, (len(prompts), C) float32, as LLM.embed does."""
        import numpy as np

        vectors = []
        for prompt in prompt_list(prompts):
            body = {"input": _sendable(prompt), "pooling": pooling, "encoding_format": "base64"}
            body["split_special_tokens"] = self._split_special_tokens
            reply = self._server.wait(self._server.post("/v1/embeddings", body))
            data = _parsed(reply, lambda reply: base64.b64decode(reply["data"][0]["embedding"]))
            vectors.append(np.frombuffer(data, "<f4"))  # (C,)
        return np.stack(vectors).astype(np.float32) if vectors else self.embed([[0]])[:0]  # has the right width

    def close(self) -> None:
        """Fail pending futures and all later calls with RequestError."""
        self._server.end()

    def __enter__(self) -> "RemoteLLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, requests: list, return_exceptions: bool) -> Iterator[tuple[int, RequestOutput | TinyGPTError]]:
        indices = {self._submit(*request): i for i, request in enumerate(requests)}
        try:
            for future in as_completed(indices):
                error = future.exception()
                is_returned = return_exceptions and isinstance(error, TinyGPTError)
                yield indices[future], error if is_returned else future.result()
        finally:
            for future in indices:
                future.cancel()

    def _submit(self, text: str | None, body: dict[str, Any], on_chunk: Any = None) -> "Future[RequestOutput]":
        return self._server.start(self._server.generate_in_turn(text, body, on_chunk))

    def _request(self, prompt: Any, params: SamplingParams | None) -> tuple[str | None, dict[str, Any]]:
        """Return the prompt's text, if it is one, and the body."""
        [checked] = params_list(params, 1)
        text = prompt.text if isinstance(prompt, Prompt) else prompt if isinstance(prompt, str) else None
        fixed = {"prompt": _sendable(prompt) or None, "split_special_tokens": self._split_special_tokens}
        return text, fixed | params_to_json(checked)


class RemoteTokenizer:
    """encode, decode and call of a Tokenizer, each an HTTP request."""

    def __init__(self, server: "_Server", split_special_tokens: bool):
        self._server, self.split_special_tokens = server, split_special_tokens

    def encode(self, text: str, split_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text. split_special_tokens: special tokens in it are plain text."""
        if not isinstance(text, str):
            raise RequestError(f"a text to encode must be a string; {type(text).__name__} was given.")
        is_split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        body = {"prompt": text, "split_special_tokens": is_split}
        return _parsed(self._server.wait(self._server.post("/tokenize", body)), lambda reply: reply["tokens"])

    def __call__(self, text: str | list[str], split_special_tokens: bool | None = None) -> dict[str, list]:
        """Return Hugging Face's {"input_ids": token ids, "attention_mask": ones}, with lists for a list of texts."""
        if isinstance(text, str):
            ids = self.encode(text, split_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        each = [self(one, split_special_tokens) for one in text]
        return {name: [encoded[name] for encoded in each] for name in ("input_ids", "attention_mask")}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        body = {"tokens": checked_ids(ids), "skip_special_tokens": skip_special_tokens}
        return _parsed(self._server.wait(self._server.post("/detokenize", body)), lambda reply: reply["prompt"])


class _Server:
    """HTTP to one server: an httpx client in an event loop of its own thread, so that futures can be cancelled."""

    def __init__(self, url: str, api_key: str | None, timeout: float, max_connections: int, max_retries: int):
        try:
            import httpx
        except ImportError:
            raise RequestError(f"RemoteLLM needs httpx, which comes with: {how_to_install('remote')}.") from None
        self._httpx, self._timeout, self._max_retries = httpx, timeout, max_retries
        self.url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        try:
            parts = httpx.URL(self.url)
            is_server = parts.scheme in ("http", "https") and parts.host and not (parts.query or parts.fragment)
        except httpx.InvalidURL:
            is_server = False
        if not is_server:
            raise RequestError(f"url is {url!r} and must be a server's, such as http://127.0.0.1:8000.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("api_key must be printable ASCII.")
        headers = {"content-type": "application/json"}
        headers |= {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
            verify=ssl.create_default_context() if self.url.startswith("https") else False,
            trust_env=False,  # a proxy for the web is none for this server
        )
        self._has_key, self._is_closed = api_key is not None, False
        self._turn = asyncio.Semaphore(max_connections)
        self._lock, self._loop = threading.Lock(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinygpt-remote", daemon=True)
        self._thread.start()

    def start(self, work: Awaitable[Any]) -> Future:
        """Run a coroutine in the loop. Cancelling the future closes the connection, and the server frees the slots."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise RequestError(CLOSED)
            return asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)

    def wait(self, work: Awaitable[Any]) -> Any:
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def end(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.close()

    async def get(self, path: str) -> Any:
        return await self._json(await self._open("GET", path, None, 0))

    async def post(self, path: str, body: Any) -> Any:
        return await self._json(await self._open("POST", path, body, self._max_retries))

    async def generate_in_turn(self, text: str | None, body: dict, on_chunk: Any) -> RequestOutput:
        arrival = time.perf_counter()
        async with self._turn:
            if on_chunk is not None:
                return await self.generate(text, body, on_chunk)
            return _parsed(await self.post("/generate", body), lambda reply: output_from_json(reply, text, arrival))

    async def generate(
        self, text: str | None, body: dict, on_chunk: Any, on_begin: Callable[[], None] = lambda: None
    ) -> RequestOutput:
        """Return the output of a streamed request, whose chunks are given to on_chunk in a thread."""
        arrival, output = time.perf_counter(), None
        async for event in self._events(body | {"stream": True}, on_begin):
            if "chunk" in event:
                await asyncio.to_thread(on_chunk, _parsed(event["chunk"], chunk_from_json))
            else:
                output = _parsed(event, lambda event: output_from_json(event["output"], text, arrival))
        return output

    async def _events(self, body: Any, on_begin: Callable[[], None]) -> AsyncIterator[Any]:
        response, is_whole = await self._open("POST", "/generate", body, self._max_retries), False
        on_begin()
        try:
            async for line in response.aiter_lines():
                is_whole = is_whole or line.startswith("data: [DONE]")
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ServerError(f"{self.url} has ended the request: {event['error']['message']}")
                    yield event
        except self._httpx.HTTPError as error:
            raise self._lost(error) from error
        finally:
            await response.aclose()
        if not is_whole:
            raise ServerError(f"{self.url} has ended its reply too early: is it still running?")

    async def _open(self, method: str, path: str, body: Any, max_retries: int) -> "httpx.Response":
        """Return an open response with status 200."""
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        for num_tries in range(max_retries + 1):
            wait = FIRST_WAIT * 2**num_tries
            try:
                request = self._client.build_request(method, path, content=content)
                response = await self._client.send(request, stream=True)
                if response.status_code == 200:
                    return response
                await response.aread()
            except self._httpx.HTTPError as error:
                if not isinstance(error, self._httpx.ConnectError) or num_tries == max_retries:
                    raise self._lost(error) from error
            else:
                if response.status_code not in BUSY or num_tries == max_retries:
                    raise self._refusal(response)
                told = response.headers.get("retry-after", "")
                wait = min(float(told), MAX_WAIT) if told.isdecimal() else wait
            await asyncio.sleep(wait)
        raise AssertionError

    async def _json(self, response: "httpx.Response") -> Any:
        try:
            return json.loads(await response.aread())
        except ValueError:
            raise ServerError(f"{self.url} is no tinygpt server: it does not speak JSON.") from None
        except self._httpx.HTTPError as error:
            raise self._lost(error) from error
        finally:
            await response.aclose()

    async def _guarded(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_closed:
                raise RequestError(CLOSED) from None
            raise

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _lost(self, error: Exception) -> ServerError:
        if isinstance(error, self._httpx.TimeoutException):
            return ServerError(f"{self.url} has said nothing for {self._timeout:g} s: raise timeout, or look at it.")
        why = str(error) or type(error).__name__
        return ServerError(f"{self.url} does not answer ({why}): start it with `tinygpt serve`, or check the address.")

    def _refusal(self, response: "httpx.Response") -> TinyGPTError:
        status = response.status_code
        try:
            told = response.json()["error"]
            message, code = told["message"], told["code"]
        except (ValueError, TypeError, LookupError):
            return ServerError(f"{self.url} is no tinygpt server: it answers with status {status}.")
        if status == 401:
            wanted = "another API key than the one given" if self._has_key else "an API key"
            return ServerError(f"{self.url} wants {wanted}: set api_key, or the variable {KEY_VARIABLE}.")
        if status == 429:
            return QueueFullError(message)
        if status == 404 and code != "model_not_found":
            return ServerError(f"{self.url} is no tinygpt server, or an older one: {message}")
        return (
            RequestError(message) if status in (400, 404, 413, 422) else ServerError(f"{self.url} refuses: {message}")
        )


def _until_done(chunks: "SimpleQueue[StreamChunk | None]", future: Future) -> Iterator[StreamChunk]:
    try:
        while (chunk := chunks.get()) is not None:
            yield chunk
        future.result()
    finally:
        future.cancel()


# Requests and outputs as JSON. Minus infinity is a string; times are seconds since the arrival.


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are not their defaults, and those whose defaults differ in a server."""
    given, default = {field.name: getattr(params, field.name) for field in fields(params)}, SamplingParams()
    for name in UNSENDABLE:
        value = given.pop(name)
        if value is not None and len(value):
            raise RequestError("cannot be sent to a server: use an LLM.", name)
    found = {name: value for name, value in given.items() if name in ALWAYS_SENT or value != getattr(default, name)}
    if "logit_bias" in found:
        found["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    for name in ("logprobs", "prompt_logprobs"):
        if found.get(name) == ALL:
            found[name] = MAX_COUNT  # the server names its limit
    if "repetition_detection" in found:
        found["repetition_detection"] = asdict(params.repetition_detection)
    return found


def output_from_json(found: Mapping[str, Any], prompt: str | None, arrival: float) -> RequestOutput:
    """prompt: the text as given. arrival: by this process's clock."""
    times = dict(found["metrics"])
    for name in ("scheduled", "first_token", "finished"):
        times[name] = None if times[name] is None else arrival + times[name]
    return RequestOutput(
        **{
            **found,
            "prompt": prompt,
            "outputs": [_sample(sample) for sample in found["outputs"]],
            "metrics": RequestMetrics(arrival, **times),
            "prompt_logprobs": _lists(found["prompt_logprobs"]),
            "prompt_cumulative_logprob": _number(found["prompt_cumulative_logprob"]),
        }
    )


def chunk_from_json(found: Mapping[str, Any]) -> StreamChunk:
    logprobs = {"logprobs": _logprobs(found["logprobs"])} if "logprobs" in found else {}
    logprobs |= {"prompt_logprobs": _lists(found["prompt_logprobs"])} if "prompt_logprobs" in found else {}
    return StreamChunk(**{**found, **logprobs})


def _sample(found: Mapping[str, Any]) -> CompletionOutput:
    sums = {name: _number(found[name]) for name in ("cumulative_logprob", "score")}
    return CompletionOutput(**{**found, **sums, "logprobs": _lists(found["logprobs"])})


def _score(found: Mapping[str, Any]) -> ContinuationScore:
    return ContinuationScore(**{**found, "logprobs": [*map(_number, found["logprobs"])]})


def _lists(found: list | None) -> list[dict[int, float] | None] | None:
    return None if found is None else [None if each is None else _logprobs(each) for each in found]


def _logprobs(found: Mapping[str, Any]) -> dict[int, float]:
    return {int(key): _number(value) for key, value in found.items()}


def _number(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value


def _card(reply: Any) -> dict[str, Any]:
    card = reply["data"][0]
    if card["owned_by"] != "tinygpt":
        raise ServerError("the server is no tinygpt server: for one of another kind, use OpenAI's client.")
    return card


def _parsed(found: Any, parse: Callable[[Any], Any]) -> Any:
    """Return parse(found). ServerError if the reply lacks what it reads."""
    try:
        return parse(found)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = "the server's reply is none that this version reads: are both ends the same version?"
        raise ServerError(message) from error


def _sendable(prompt: Any) -> str | list[int]:
    prompt = prompt.token_ids if isinstance(prompt, Prompt) else prompt
    return prompt if isinstance(prompt, str) else checked_ids(prompt)
