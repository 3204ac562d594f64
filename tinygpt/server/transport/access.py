"""AccessLog: every request gets an id, a line in the log and its place in the metrics. Its own lines hold no text."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinygpt.outputs import RequestOutput
from tinygpt.request.request import Progress
from tinygpt.server.metrics import Metrics
from tinygpt.server.record import Record, put_record

log = logging.getLogger("tinygpt.server.access")
LEFT = 499  # nginx's status for a client that has left before its reply
_ID = re.compile(r"[\x21-\x7e]{1,200}")


class AccessLog:
    """ASGI middleware, outside all that may refuse: that is logged as well.

    A client's own X-Request-Id is taken over; any other request is given one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, waited: Callable[[float, float], float], paths: frozenset[str]):
        """waited(start, stop): the seconds between two moments in which steps waited for kernels to be compiled.
        paths: what is counted by its name; any other path is one of many that a stranger may make up.
        """
        self._app, self._metrics, self._waited, self._paths = app, metrics, waited, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, begun = Headers(scope=scope).get("x-request-id", ""), time.perf_counter()
        record = Record(given if _ID.fullmatch(given) else secrets.token_hex(16))
        put_record(scope, record)
        status, is_whole = LEFT, False

        async def note(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            elif not message.get("more_body", False):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:  # a bug, for which others reply
            status, is_whole = 500, True
            raise
        finally:
            self._note_end(scope, record, status if is_whole else LEFT, begun, time.perf_counter())

    def _note_end(self, scope: Scope, record: Record, status: int, begun: float, ended: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.count_http(path, status)
        outputs, unfinished, waited = [], [], 0.0
        if record.generation is not None:
            outputs, unfinished = record.generation.outcome()
            waited = self._waited(begun, ended)
            self._metrics.observe_gaps(record.generation.token_gaps())
        for output in outputs:
            self._metrics.observe(output)
        for progress in unfinished:
            self._metrics.observe_unfinished(progress)
        if unfinished:
            self._metrics.count_abort()
        # A path may hold anything, in a terminal's own language too.
        fields = {"id": record.id, "method": scope["method"], "path": ascii(scope["path"])[1:-1], "status": status}
        times = {"compile": round(waited, 6) or None, "seconds": round(ended - begun - waited, 6)}
        log.info("request", extra={"fields": {**fields, **_work(record, outputs, unfinished), **times}})


def _work(record: Record, outputs: list[RequestOutput], unfinished: list[Progress]) -> dict[str, Any]:
    """What the engine did for a request."""
    if not (outputs or unfinished):
        return {"prompt_tokens": record.num_prompt_tokens} if record.num_prompt_tokens else {}
    samples = [sample for output in outputs for sample in output.outputs]
    reasons = sorted({sample.finish_reason for sample in samples}) + ["abort"] * bool(unfinished)
    times = [each.metrics for each in (*outputs, *unfinished)]
    firsts = [each.time_to_first_token for each in times]
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_made = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": num_read + sum(progress.num_prompt_tokens for progress in unfinished),
        "completion_tokens": num_made + sum(progress.num_new_tokens for progress in unfinished),
        "queue": _seconds(max, [each.queue_time for each in times]),
        "ttft": _seconds(min, [first for first in firsts if first is not None]),
        "finish": ",".join(reasons),
    }


def _seconds(choose: Callable[..., float], found: list[float]) -> float | None:
    return round(choose(found), 6) if found else None
