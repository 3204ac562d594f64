"""What a run says of a server: throughput, latencies, and the share of requests that were served well."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .workload import Run

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class ServiceLevel:
    """What a request served well may take, in seconds."""

    time_to_first_token: float
    time_per_output_token: float


def figures(run: Run, level: ServiceLevel) -> dict[str, Any]:
    """Tokens and requests a second, milliseconds by percentile, and goodput: requests within the level, a second."""
    done = [exchange for exchange in run.exchanges if exchange.is_complete]
    firsts = [exchange.time_to_first_token for exchange in done]
    each = [time for exchange in done if (time := exchange.time_per_output_token) is not None]
    gaps = [gap for exchange in done for gap in exchange.inter_token_latencies]
    good = [
        exchange
        for exchange in done
        if exchange.time_to_first_token <= level.time_to_first_token
        and (exchange.time_per_output_token or 0) <= level.time_per_output_token
    ]
    return {
        "requests": len(run.exchanges),
        "failed": len(run.exchanges) - len(done),
        "seconds": run.seconds,
        "tokens_per_second": sum(exchange.num_tokens for exchange in done) / run.seconds,
        "requests_per_second": len(done) / run.seconds,
        "goodput": len(good) / run.seconds,
        "ttft_ms": percentiles(firsts),
        "tpot_ms": percentiles(each),
        "itl_ms": percentiles(gaps),
    }


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """In milliseconds, each a value that was met."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"p{p}": 1e3 * ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in PERCENTS}
