"""`generate --input` with OpenAI's batch lines: the server's app answers each body, without a connection."""

import argparse
import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..aliases import OURS
from ..errors import RequestError, how_to_install, suggest
from ..fields import MAX_COUNT
from ..sampling_params import SamplingParams
from ..server.config import ServerConfig
from ..wire import params_to_json
from .batch import Earlier, Run, read_earlier
from .flags import FLAGS, compiling, flag_of, load_llm
from .streams import counted, line_readers, log, rates, read_lines, read_object

if TYPE_CHECKING:
    from fastapi import FastAPI

FIELDS = ("custom_id", "method", "url", "body")
FAILED = 400  # and above: the status of an error
FULL = 429
RETRY_SECONDS = 1.0
ACCESS_LOG = "tinygpt.server.access"


def are_openais(content: bytes) -> bool:
    """Return whether a file has such lines: by the first that is JSON."""
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            return isinstance(fields := json.loads(line), dict) and not {*FIELDS[:3]}.isdisjoint(fields)
    return False


@dataclass(frozen=True)
class BatchRequest:
    line: int
    id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    status: int
    request_id: str
    body: Any

    def line(self, custom_id: str) -> str:
        """Return one line of JSON, in OpenAI's format of results."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        record = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": response}
        return json.dumps(record | {"error": None}, ensure_ascii=False)


@dataclass(frozen=True)
class LineReader:
    """Reads lines of one file. flags: defaults of their bodies. line_of: the lines that are read, by custom_id."""

    form_of: dict[str, Any]
    check_body: Callable[[Any, dict[str, Any]], None]
    flags: dict[str, Any]
    line_of: dict[str, int]

    def request(self, number: int, line: bytes) -> BatchRequest:
        """Raise RequestError with all faults of the line, each on a line of its own."""
        fields = read_object(line, ())
        faults = [
            f"unknown field {json.dumps(name)}{suggest(name, FIELDS) or '.'}"
            for name, value in fields.items()
            if name not in FIELDS and value is not None
        ]
        custom_id, method, url, body = map(fields.get, FIELDS)
        if not isinstance(custom_id, str) or not custom_id:
            faults.append(f"custom_id is {json.dumps(custom_id)} and must be a text.")
        elif (first := self.line_of.setdefault(custom_id, number)) != number:
            faults.append(f"custom_id {custom_id!r} is already that of line {first}.")
        if method not in (None, "POST"):
            faults.append(f'method is {json.dumps(method)} and must be "POST".')
        has_url = isinstance(url, str) and url in self.form_of
        if not has_url:
            faults.append(f"url is {json.dumps(url)} and must be one of {', '.join(self.form_of)}.")
        if not isinstance(body, dict):
            faults.append(f"body is {json.dumps(body)[:100]} and must be an object.")
        elif body.get("stream"):
            faults.append("body.stream is true: the replies of a batch are whole.")
        elif has_url:
            try:
                body = self._with_flags(url, body)
            except RequestError as error:
                faults.append(str(error))
        if faults:
            raise RequestError("\n".join(faults))
        return BatchRequest(number, custom_id, url, body)

    def _with_flags(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with the flags that it leaves open, but for those that a url does not have."""
        form = self.form_of[url]
        self.check_body(form, body)
        names = OURS | {field.alias: name for name, field in form.model_fields.items() if field.alias}
        given = {names.get(name, name) for name, value in body.items() if value is not None}
        missing = form.model_fields.keys() - given
        left = {name: value for name, value in self.flags.items() if name in missing}
        body = {name: value for name, value in body.items() if names.get(name, name) not in left}
        faults: dict[str, RequestError] = {}
        is_taken = True
        while is_taken:  # a flag may need another: --min-tokens a higher --max-tokens
            is_taken = False
            for name, value in [*left.items()]:
                try:
                    self.check_body(form, {name: value} | body)
                except RequestError as error:
                    faults[name] = error
                    continue
                body = {name: left.pop(name)} | body
                is_taken = True
        if left:
            told = (f"{flag_of(name)} does not fit {url}: {faults[name]}" for name in left)
            raise RequestError("\n".join(told))
        return body


class OpenAIRun(Run):
    """A run whose `pending` are BatchRequests."""

    item: ClassVar[str] = "request"
    reason: ClassVar[str] = '"response" in their records says why'

    @classmethod
    def read(cls, path: Path, content: bytes, args: argparse.Namespace, params: SamplingParams) -> list[Any]:
        """Return the requests of a file. Raise RequestError that lists every line with an error."""
        if args.ray is not None or args.steer is not None:
            flag = "--steer" if args.ray is None else "--ray"
            raise RequestError(
                f"{flag} is for lines with a prompt: --input {path} has OpenAI's, with a body."
            )
        try:
            from ..server.app import forms
            from ..server.gate import check_body
        except ImportError as error:
            needs = f"OpenAI's lines in --input {path} need {error.name}"
            raise RequestError(f"{needs}, which comes with: {how_to_install('serve')}.") from None
        asking = json.loads(json.dumps(params_to_json(params)))  # a body has lists in place of tuples
        given = args.given & FLAGS.keys() | {"soft_prompt"}
        flags = {name: asking[name] for name in sorted(given & asking.keys())}
        reader = LineReader(forms(), check_body, flags, {})
        return read_lines(path, line_readers(content, reader.request))

    @classmethod
    def earlier_in(cls, path: Path, requests: Iterable[Any], args: argparse.Namespace) -> Earlier:
        record_in = partial(_record_in, dict(args.lora_modules or ()).keys())
        return read_earlier(path, requests, args.model, args.dtype, record_in, id_field="custom_id")

    def answer(self) -> int:
        llm, load_seconds = load_llm(self.args)
        from ..server.app import create_app

        known = (self.args.model, *llm.lora_modules)
        names = dict.fromkeys(filter(None, (request.body.get("model") for request in self.pending)))
        others = [name for name in names if name not in known]
        if others:
            log(f"{self.args.model} answers requests to {', '.join(others)}")
        # Their replies name the model that answers.
        requests = [
            replace(request, body=request.body | {"model": None})
            if request.body.get("model") in others
            else request
            for request in self.pending
        ]
        config = ServerConfig(served_model_names=(self.args.model,), max_body_bytes=MAX_COUNT)
        num_failed = 0
        before = llm.engine.throughput

        def record(i: int, reply: Reply) -> str:
            nonlocal num_failed
            num_failed += reply.status >= FAILED
            return reply.line(self.pending[i].id)

        most = 2 * llm.engine.engine_config.max_num_seqs  # as many wait as run
        with _replies(create_app(llm, config), requests, most) as replies:
            self.write_all(replies, record)
        done = f"{counted(len(self.pending), 'request')}: {rates(llm.engine.throughput - before)}"
        log(f"{done}; load {load_seconds:.2f} s{compiling(self.args)}")
        return num_failed


def _record_in(adapters: Collection[str], line: bytes) -> dict[str, Any] | None:
    """Return the record's id and what it says of the model, of which an adapter is a part, and of its dtype."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(line)
        if isinstance(record["custom_id"], str):
            status = record["response"]["status_code"]
            body = record["response"]["body"]
            fingerprint = body.get("system_fingerprint") or "auto"  # ends in the dtype
            said = {"id": record["custom_id"], "dtype": fingerprint.rpartition("-")[2]}
            if body.get("model") not in (None, *adapters):
                said["model"] = body["model"]
            return said | ({"error": status} if status >= FAILED else {})
    return None


@contextmanager
def _replies(
    app: "FastAPI", requests: list[BatchRequest], most: int
) -> Iterator[Iterator[tuple[int, Reply]]]:
    """Yield the replies with their index, as they finish. At the end, those under way are given up."""
    loop = asyncio.new_event_loop()
    tasks: set[asyncio.Task[tuple[int, Reply]]] = set()

    async def ask(i: int, request: BatchRequest) -> tuple[int, Reply]:
        while (reply := await _ask(app, request)).status == FULL:  # others hold the memory or the queue
            await asyncio.sleep(RETRY_SECONDS)
        return i, reply

    def finished() -> Iterator[tuple[int, Reply]]:
        waiting = enumerate(requests)
        while True:
            tasks.update(loop.create_task(ask(*pair)) for pair in islice(waiting, most - len(tasks)))
            if not tasks:
                return
            done, _ = loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            tasks.difference_update(done)
            yield from (task.result() for task in done)

    access_log = logging.getLogger(ACCESS_LOG)
    access_log.disabled = True
    try:
        yield finished()
    finally:
        loop.set_exception_handler(lambda *_: None)  # Ctrl-C may be an error of a task, which is told already
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.close()
        access_log.disabled = False


async def _ask(app: "FastAPI", request: BatchRequest) -> Reply:
    """Return the app's reply to a request that arrives whole, of a client that stays."""
    body = json.dumps(request.body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    parts = [{"type": "http.request", "body": body}]
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    with suppress(Exception):  # a bug: the app has replied with status 500
        await app(scope, receive, send)
    start, *bodies = messages
    content = b"".join(message.get("body", b"") for message in bodies)
    headers = dict(start["headers"])
    return Reply(start["status"], headers[b"x-request-id"].decode(), json.loads(content))
