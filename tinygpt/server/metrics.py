"""Metrics: what Prometheus reads at /metrics, under our names and under vLLM's, for the dashboards that know those."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

import tinygpt
from tinygpt.llm import LLM
from tinygpt.outputs import RequestOutput
from tinygpt.request.request import Progress

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
OURS, VLLM = "tinygpt:", "vllm:"


class Metrics:
    """Of one app. Every series has the label model_name."""

    def __init__(self, llm: LLM, model_name: str):
        disable_created_metrics()
        self._label = {"model_name": model_name}
        self._registry = CollectorRegistry()
        self._own = CollectorRegistry()  # what goes by two names
        self._engine_gauges(llm)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._cached = self._counter("prefix_cache_hits", "Tokens of prompts that were in the KV cache")
        self._looked_up = self._counter("prefix_cache_queries", "Tokens of prompts that were looked for there")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to a slot", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From a slot to the first token", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last", SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "From a slot to the last token", SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Between a request's tokens, on average", TOKEN_SECONDS
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds",
            "From a streamed token to the next, as the engine hands them out",
            TOKEN_SECONDS,
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self._length = self._histogram("request_generation_tokens", "Tokens generated for a prompt", TOKENS)
        self._longest = self._histogram("request_max_num_generation_tokens", "Tokens of the longest sample", TOKENS)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt that were not in the KV cache", TOKENS
        )
        self._success = Counter(
            f"{OURS}request_success", "Requests that ended", ["model_name", "finished_reason"], registry=self._own
        )
        self._registry.register(_TwoNames(self._own))
        self._http = Counter(
            f"{OURS}http_requests", "HTTP requests", ["model_name", "path", "status"], registry=self._registry
        )
        info = Gauge(f"{OURS}build_info", "What runs", ["model_name", "version", "dtype"], registry=self._registry)
        info.labels(model_name, tinygpt.__version__, llm.dtype).set(1)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """What is counted of requests and the engine, under our names, at this moment."""
        return self._own.collect()

    def count_http(self, path: str, status: int) -> None:
        self._http.labels(path=path, status=str(status), **self._label).inc()

    def count_abort(self) -> None:
        self._success.labels(finished_reason="abort", **self._label).inc()

    def observe(self, output: RequestOutput) -> None:
        """One prompt whose samples have ended."""
        times, num_tokens = output.metrics, sum(len(sample.token_ids) for sample in output.outputs)
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._generation_tokens.inc(num_tokens)
        self._looked_up.inc(len(output.prompt_token_ids))
        self._cached.inc(output.num_cached_tokens)
        self._prompt_length.observe(len(output.prompt_token_ids))
        self._computed.observe(len(output.prompt_token_ids) - output.num_cached_tokens)
        self._length.observe(num_tokens)
        self._longest.observe(times.num_steps)
        self._queue.observe(times.queue_time)
        self._e2e.observe(times.time_to_finish)
        if times.time_to_first_token is not None:
            self._ttft.observe(times.time_to_first_token)
            self._prefill.observe(times.prefill_time)
            self._decode.observe(times.decode_time)
            self._inference.observe(times.prefill_time + times.decode_time)
        if times.time_per_output_token is not None:
            self._tpot.observe(times.time_per_output_token)
        for sample in output.outputs:
            self._success.labels(finished_reason=sample.finish_reason, **self._label).inc()

    def observe_unfinished(self, progress: Progress) -> None:
        """One prompt whose samples were given up: what was done for it. Times and lengths that it never came to are
        left out."""
        times = progress.metrics
        self._generation_tokens.inc(progress.num_new_tokens)
        if times.first_token is None:
            return
        self._prompt_tokens.inc(progress.num_prompt_tokens)
        self._looked_up.inc(progress.num_prompt_tokens)
        self._cached.inc(progress.num_cached_tokens)
        self._queue.observe(times.queue_time)
        self._ttft.observe(times.time_to_first_token)
        self._prefill.observe(times.prefill_time)

    def observe_gaps(self, seconds: Iterable[float]) -> None:
        """Between the tokens of a stream, each by itself: its average says nothing of a pause."""
        self._itl.observe(*seconds)

    def _engine_gauges(self, llm: LLM) -> None:
        engine, num_slots = llm.engine, llm.engine.engine_config.max_num_seqs
        gauges = {
            "num_requests_running": ("Samples that run", lambda: len(engine.scheduler.running)),
            "num_requests_waiting": ("Samples that wait for a slot", lambda: len(engine.scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the slots in use", lambda: len(engine.scheduler.running) / num_slots),
        }
        for name, (help_, read) in gauges.items():
            gauge = Gauge(f"{OURS}{name}", help_, ["model_name"], registry=self._own)
            gauge.labels(**self._label).set_function(read)

    def _counter(self, name: str, help_: str) -> Counter:
        return Counter(f"{OURS}{name}", help_, ["model_name"], registry=self._own).labels(**self._label)

    def _histogram(self, name: str, help_: str, bounds: tuple[float, ...]) -> "_Histogram":
        histogram = _Histogram(f"{OURS}{name}", help_, self._label, bounds)
        self._own.register(histogram)
        return histogram


class _Histogram(Collector):
    """For the event loop alone, so that it needs no locks: those of prometheus_client take most of a microsecond for
    each value, of which a request has a hundred."""

    def __init__(self, name: str, help_: str, label: dict[str, str], bounds: tuple[float, ...]):
        """bounds: of the buckets, which are for what is no greater."""
        self._name, self._help, self._label, self._bounds = name, help_, label, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, *values: float) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._label))
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self._label.values()), buckets, self._sum)
        yield family


class _TwoNames(Collector):
    """All metrics of a registry, and once more under the names that vLLM has for the same."""

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
