"""Requests as they run, their metrics, also by vLLM's names for existing dashboards, and the log on stderr."""

import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

import tinygpt

from ..async_llm import AsyncRequests, IndexedChunk, Outbox
from ..engine.engine import RequestFuture
from ..engine.sequence import Progress
from ..errors import RequestError
from ..llm import LLM
from ..outputs import StreamChunk

OURS, VLLM = "tinygpt:", "vllm:"
Kind = TypeVar("Kind", Counter, Gauge, Histogram)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "generation_tokens": "Tokens generated",
    "prefix_cache_hits": "Tokens of prompts that were in the KV cache",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the KV cache",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", SECONDS),
    "request_queue_time_seconds": ("From arrival to a slot", SECONDS),
    "request_prefill_time_seconds": ("From a slot to the first token", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last", SECONDS),
    "request_inference_time_seconds": ("From a slot to the last token", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", SECONDS),
    "request_time_per_output_token_seconds": ("Between a request's tokens, on average", TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Between a stream's tokens, as the engine returns them", TOKEN_SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt", TOKENS),
    "request_generation_tokens": ("Tokens generated for a prompt", TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest sample", TOKENS),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that were not in the KV cache", TOKENS),
}
OUT_OF_DESCRIPTORS = "socket.accept() out of system resource"
LOG_SECONDS = 60.0  # asyncio's, and how often it is told
MAX_UNREAD = 10_000  # chunks of a request; with 20 log probabilities each, they take about 20 MB
UNREAD_SECONDS = 5.0


class RunningRequest(AsyncRequests):
    """A client's requests and the times of their tokens. A client that does not read its stream ends them."""

    futures: list[RequestFuture]

    def __init__(self, outbox: Outbox, stream: bool):
        super().__init__(outbox, stream)
        self._times: dict[tuple[int, int], list[float]] = {}  # (request, sample) -> when each token came
        self._num_posted = 0  # by the thread of the engine
        self._num_taken = 0  # by the loop
        self._taken_at = time.perf_counter()

    def post(self, i: int, chunk: StreamChunk) -> None:
        self._num_posted += 1
        now = time.perf_counter()
        if chunk.token_id is not None:
            self._times.setdefault((i, chunk.index), []).append(now)
        if self._num_posted - self._num_taken > MAX_UNREAD and now - self._taken_at > UNREAD_SECONDS:
            self.cancel(RequestError(f"{MAX_UNREAD} tokens of the stream were not read: read it faster."))
        super().post(i, chunk)

    async def chunks(self, ping_seconds: float | None = None) -> AsyncIterator[list[IndexedChunk] | None]:
        async for chunks in super().chunks(ping_seconds):
            self._num_taken += len(chunks or ())
            self._taken_at = time.perf_counter()
            yield chunks

    def finish(self) -> list[tuple[Progress, list[str]]]:
        """End the requests. Return the progress of each, and its finish reasons: "abort" if it is not finished."""
        self.cancel()
        ended = []
        for future in self.futures:
            progress = future.request.progress()
            reasons = ["abort"]
            if future.done() and not future.cancelled() and not future.exception():
                samples = getattr(future.result(), "outputs", ())  # of texts, not of embeddings or scores
                progress = replace(progress, num_new_tokens=sum(len(sample.token_ids) for sample in samples))
                reasons = [sample.finish_reason for sample in samples] or ["length"]
            ended.append((progress, reasons))
        self.end()
        return ended

    def token_gaps(self) -> Iterator[float]:
        """Yield the seconds between tokens of each streamed sample."""
        for times in list(self._times.values()):
            yield from (after - before for before, after in pairwise(times))


class Metrics:
    """Every series has the label model_name."""

    def __init__(self, llm: LLM, model_name: str):
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self.own = CollectorRegistry()  # own: series that also have vLLM's names

        def new(kind: type[Kind], name: str, text: str, *labels: str, registry=self.own, **more: Any) -> Kind:
            return kind(OURS + name, text, ["model_name", *labels], registry=registry, **more)

        self._counters = {
            name: new(Counter, name, text).labels(model_name) for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: new(Histogram, name, text, buckets=bounds).labels(model_name)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        ended = new(Counter, "request_success", "Requests that ended", "finished_reason")
        self._count_end = lambda reason: ended.labels(model_name, reason).inc()
        scheduler = llm.engine.scheduler
        num_slots = llm.engine.engine_config.max_num_seqs
        gauges = {
            "num_requests_running": ("Running samples", lambda: len(scheduler.running)),
            "num_requests_waiting": ("Samples that wait for a slot", lambda: len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the slots in use", lambda: len(scheduler.running) / num_slots),
        }
        for name, (text, read) in gauges.items():
            new(Gauge, name, text).labels(model_name).set_function(read)
        others = {"registry": self._registry}
        http = new(Counter, "http_requests", "HTTP requests", "path", "status", **others)
        self.count_http = lambda path, status: http.labels(model_name, path, str(status)).inc()
        info = new(Gauge, "build_info", "Version and dtype", "version", "dtype", **others)
        info.labels(model_name, tinygpt.__version__, llm.dtype).set(1)
        self._registry.register(_TwoNames(self.own))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def observe(self, ended: Iterable[tuple[Progress, list[str]]], token_gaps: Iterable[float]) -> None:
        """Count ended requests, as `RunningRequest.finish` returns them.

        token_gaps: seconds between the tokens of streams.
        """
        for seconds in token_gaps:
            self._histograms["inter_token_latency_seconds"].observe(seconds)
        for progress, reasons in ended:
            times = progress.metrics
            is_whole = reasons != ["abort"]
            is_begun = is_whole or times.first_token is not None
            made = progress.num_new_tokens
            read, cached = (progress.num_prompt_tokens, progress.num_cached_tokens) if is_begun else (0, 0)
            for counter, count in zip(self._counters.values(), (read, made, cached, read), strict=True):
                counter.inc(count)
            for reason in reasons:
                self._count_end(reason)
            values = {
                "time_to_first_token_seconds": times.time_to_first_token,
                "request_queue_time_seconds": times.queue_time if is_begun else None,
                "request_prefill_time_seconds": times.prefill_time,
            }
            if is_whole:
                prefill = times.prefill_time
                decode = times.decode_time
                values |= {
                    "request_decode_time_seconds": decode,
                    "request_inference_time_seconds": None if prefill is None else prefill + decode,
                    "e2e_request_latency_seconds": times.time_to_finish,
                    "request_time_per_output_token_seconds": times.time_per_output_token,
                    "request_prompt_tokens": read,
                    "request_generation_tokens": made,
                    "request_max_num_generation_tokens": times.num_steps,
                    "request_prefill_kv_computed_tokens": read - cached,
                }
            for name, value in values.items():
                if value is not None:
                    self._histograms[name].observe(value)


class _TwoNames(Collector):
    """All metrics of a registry, and the same again under vLLM's names."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            other = Metric(_renamed(metric.name), metric.documentation, metric.type)
            other.samples = [Sample(_renamed(sample.name), *sample[1:]) for sample in metric.samples]
            yield other


def _renamed(name: str) -> str:
    return VLLM + name.removeprefix(OURS)


def configure_logging(form: str) -> None:
    """Write the logs of the server, uvicorn and asyncio to stderr, as "text" or as "json" lines.

    The package's level, which --log-level sets, may ask for less.
    """
    least = logging.getLogger("tinygpt").level
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Seldom())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name, level in (
        ("tinygpt.server", logging.INFO),
        ("uvicorn", logging.WARNING),
        ("asyncio", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.level = max(level, least)
        logger.propagate = False


class Seldom(logging.Filter):
    """asyncio logs used up descriptors, with a traceback, for each connection that waits, every second."""

    def __init__(self):
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(OUT_OF_DESCRIPTORS):
            return True
        if is_due := record.created >= self._next:
            self._next = record.created + LOG_SECONDS
        return is_due


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00Z INFO request id=... status=200"""

    converter = time.gmtime

    def __init__(self):
        super().__init__("{asctime} {levelname} {message}", "%Y-%m-%dT%H:%M:%SZ", style="{")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {}).items()
        return " ".join(
            [super().formatMessage(record), *(f"{n}={_unbroken(v)}" for n, v in fields if v is not None)]
        )


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields | getattr(record, "fields", {}))


def _unbroken(value: Any) -> str:
    """Return a value that cannot look like another field or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)
