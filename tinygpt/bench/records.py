"""A record of each test: a dictionary with llama-bench's keys, so that its readers work, and keys of our own.

Reading prompts is its "pp" test and generating its "tg" test, which begins after `n_depth` tokens; times are those of
the forward passes, without tokenisation and sampling, as there. Where it means one sequence, there are `batch_size`
here: n_prompt, n_gen and n_depth are of each, and tokens a second of all together.

Our own keys, of the median run unless stated otherwise:
    test, dtype, kv_cache_dtype, batch_size
    median_ts, low_ts, high_ts          tokens a second: the median, the slowest and the fastest run
    ms_per_token                        pp: over all tokens; tg: from one token of a sequence to its next, that is the
                                        time of the passes in which the whole batch decodes / their number
    first_token_ms                      pp: from the call of generate to the first token of the last prompt; tg: null
    read_gbs, bandwidth_share           what a pass reads a second (weights, for tg the KV cache too); as a share of...
    bandwidth_gbs                       ...what this machine reads, measured
    gflops, peak_share                  10**9 operations a second; as a share of what our tiles could do in the caches
    block_peak_gflops, head_peak_gflops what they could do, measured, with the dtype of the blocks and of the head
    outside_share                       share of generate's whole time that is spent outside forward passes
    sampling_share                      share of the whole time that goes to choosing tokens
    peak_memory                         bytes of the process, or what the model takes of the GPU; null where unknown
"""

import statistics
from dataclasses import dataclass
from datetime import datetime, timezone

from tinygpt.bench.build import Build
from tinygpt.bench.formats import Record, parameters_text
from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.bench.measure import Measurement
from tinygpt.bench.work import (
    CACHE_NAMES,
    block_operations,
    head_operations,
    kv_cache_bytes,
    model_bytes,
    num_parameters,
    tiles_of,
    weight_bytes,
)
from tinygpt.weights.config import ModelConfig

# GGML's names.
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8", "int4": "Q4"}
# What llama.cpp's compare-llama-bench.py asks for and has no meaning here, with its values for a plain run on a CPU.
WITHOUT_MEANING = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 0,
    "n_gpu_layers": 0,
    "split_mode": "none",  # but for ranks
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": False,
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "use_mmap": False,
    "embeddings": False,
    "no_op_offload": 0,
}


@dataclass(frozen=True)
class Setup:
    """What the tests of one loaded model have in common."""

    build: Build
    cpu: str
    model: str
    config: ModelConfig
    dtype: str
    kv_cache_dtype: str
    threads: int
    step_tokens: int  # new tokens in a step, at most
    limits: MachineLimits
    ranks: tuple[int, int] = (1, 1)  # tensor and pipeline parallel; threads, and limits, are those of each
    gpu: str = ""  # its name, where it computes in place of the CPU

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"


@dataclass(frozen=True)
class Effort:
    """What one run of a test took, by its passes: tokens that went through them, and what these passes had to do."""

    seconds: float
    tokens: int
    bytes_read: float
    block_operations: float
    head_operations: float


def record_of(setup: Setup, measurement: Measurement, is_generation: bool, ended: datetime) -> Record:
    """The record of a test that ended at that time."""
    counts = counts_of(measurement.prompt_length, measurement.new_tokens if is_generation else 0)
    n_prompt, n_gen, n_depth = counts.values()
    effort_of = _generation if is_generation else _reading
    efforts = [effort_of(setup, measurement, i) for i in range(len(measurement.runs))]
    return {
        **_about(setup),
        **WITHOUT_MEANING,
        **({} if setup.ranks == (1, 1) else {"split_mode": "tensor {} x pipeline {}".format(*setup.ranks)}),
        **({"n_gpu_layers": setup.config.n_layer} if setup.gpu else {}),
        **counts,
        "test_time": ended.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **_times(efforts, measurement.batch_size * (n_prompt + n_gen)),
        "test": f"tg{n_gen} @ d{n_depth}" if is_generation else f"pp{n_prompt}",
        "dtype": setup.dtype,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "batch_size": measurement.batch_size,
        **_shares(efforts, setup),
        "ms_per_token": statistics.median(_ms_per_token(e, measurement, is_generation) for e in efforts),
        "first_token_ms": None if is_generation else _median_ms([run.first_token for run in measurement.runs]),
        "outside_share": statistics.median(1 - (run.prompt + run.generation) / run.total for run in measurement.runs),
        "sampling_share": statistics.median(run.sampling / run.total for run in measurement.runs),
        "peak_memory": measurement.peak_memory or None,
    }


def counts_of(prompt_length: int, new_tokens: int) -> Record:
    """llama-bench's: a generation begins at a depth, and no prompt is counted in it; 0 new tokens are none."""
    if new_tokens:
        return {"n_prompt": 0, "n_gen": new_tokens, "n_depth": prompt_length}
    return {"n_prompt": prompt_length, "n_gen": 0, "n_depth": 0}


def _about(setup: Setup) -> Record:
    size = num_parameters(setup.config)
    return {
        "build_commit": setup.build.commit,
        "build_number": setup.build.number,
        "cpu_info": setup.cpu,
        "gpu_info": setup.gpu,
        "backends": "CUDA" if setup.gpu else "CPU",
        "model_filename": setup.model,
        "model_type": f"gpt2 {parameters_text(size)} {DTYPE_NAMES[setup.dtype]}",
        "model_size": model_bytes(setup.config, setup.dtype),
        "model_n_params": size,
        "n_batch": setup.step_tokens,
        "n_ubatch": setup.step_tokens,
        "n_threads": setup.threads,
        "type_k": CACHE_NAMES[setup.kv_cache_dtype],
        "type_v": CACHE_NAMES[setup.kv_cache_dtype],
    }


def _reading(setup: Setup, measurement: Measurement, i: int) -> Effort:
    run, config = measurement.runs[i], setup.config
    tokens = measurement.batch_size * measurement.prompt_length
    num_logit_passes = min(run.num_prompt_steps, measurement.batch_size)  # those in which a prompt ends
    return Effort(
        run.prompt,
        tokens,
        weight_bytes(config, setup.dtype, run.num_prompt_steps, num_logit_passes),
        block_operations(config, tokens, (measurement.prompt_length + 1) / 2),
        head_operations(config, measurement.batch_size),
    )


def _generation(setup: Setup, measurement: Measurement, i: int) -> Effort:
    """Of the passes in which the whole batch decodes: each new token but the first of a sequence goes through one."""
    run, config = measurement.runs[i], setup.config
    tokens = run.num_together * measurement.batch_size
    attended = measurement.prompt_length + measurement.new_tokens / 2  # by a token, on average
    cache = kv_cache_bytes(config, setup.kv_cache_dtype, tokens * attended)
    return Effort(
        run.together,
        tokens,
        weight_bytes(config, setup.dtype, run.num_together) + cache,
        block_operations(config, tokens, attended),
        head_operations(config, tokens),
    )


def _times(efforts: list[Effort], num_tokens: int) -> Record:
    """llama-bench's, and the median and the ends of its samples. A time is that of `num_tokens`: one that generates is
    that of its passes, which are one fewer than the new tokens, and scaled to all of these."""
    rates = [effort.tokens / effort.seconds for effort in efforts]
    times = [round(1e9 * num_tokens / rate) for rate in rates]
    return {
        "avg_ns": round(statistics.fmean(times)),
        "stddev_ns": round(_deviation(times)),
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": _deviation(rates),
        "samples_ns": times,
        "samples_ts": rates,
        "median_ts": statistics.median(rates),
        "low_ts": min(rates),
        "high_ts": max(rates),
    }


def _shares(efforts: list[Effort], setup: Setup) -> Record:
    tiles, bandwidth = tiles_of(setup.dtype, setup.device), setup.limits.bandwidth
    block_rate, head_rate = map(setup.limits.tile_rates.get, tiles)
    read = statistics.median(e.bytes_read / e.seconds for e in efforts)
    done = statistics.median((e.block_operations + e.head_operations) / e.seconds for e in efforts)
    peak_share = statistics.median(
        (e.block_operations / block_rate + e.head_operations / head_rate) / e.seconds for e in efforts
    )
    return {
        "read_gbs": read / 1e9,
        "bandwidth_share": read / bandwidth,
        "bandwidth_gbs": bandwidth / 1e9,
        "gflops": done / 1e9,
        "peak_share": peak_share,
        "block_peak_gflops": block_rate / 1e9,
        "head_peak_gflops": head_rate / 1e9,
    }


def _ms_per_token(effort: Effort, measurement: Measurement, is_generation: bool) -> float:
    together = measurement.batch_size if is_generation else 1
    return 1e3 * effort.seconds / effort.tokens * together


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _deviation(values: list[float]) -> float:
    """Of a sample, as llama-bench has it; 0 where there is one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
