"""The cases of `tinygpt bench`: checked before any work, measured, and recorded with llama-bench's keys.

Reading prompts is llama-bench's "pp" test and generating its "tg" test, which begins after `n_depth` tokens. n_prompt,
n_gen and n_depth are of one sequence; tokens a second are of all `batch_size` together. Fields of tinygpt's own:

    median_ts, low_ts, high_ts          tokens a second: median, slowest and fastest run
    ms_per_token                        tg: from one token of a sequence to its next
    first_token_ms                      pp: from the call of generate to the first token of the last prompt
    read_gbs, bandwidth_share           weights and KV cache read a second; share of bandwidth_gbs, which is measured
    gflops, peak_share                  10**9 operations a second; share of block_peak_gflops and head_peak_gflops
    outside_share, sampling_share       share of generate's time outside forward passes; in choosing tokens
    peak_memory                         bytes of the process, or of the GPU; null if unknown
"""

import functools
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from tqdm import tqdm

import tinygpt

from ..engine.model_runner import load_backend
from ..engine.scheduler import WORTH_WAITING
from ..errors import RequestError
from ..hardware import cpu_name, thread_count
from ..llm import LLM
from ..llm_args import LLMArgs
from ..ranks.lead import open_sources
from ..weights.config import ModelConfig
from . import roofline
from .measure import Case, Measurement, Run, meter_of, run_case
from .report import Record, parameters_text, threads_text
from .roofline import CACHE_NAMES, MachineLimits, measure_limits

# GGML's names.
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8", "int4": "Q4"}
# Fields that compare-llama-bench.py of llama.cpp requires, with the values of a plain run on a CPU.
UNUSED_FIELDS = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 0,
    "n_gpu_layers": 0,
    "split_mode": "none",
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
class Plan:
    """Every case with each dtype and each number of threads."""

    model: str
    caches: dict[str, str]  # dtype of the weights -> dtype of the KV cache
    threads: tuple[int, ...]
    cases: tuple[Case, ...]
    repetitions: int
    config: ModelConfig
    ranks: tuple[int, int] = (1, 1)  # tensor_parallel_size, pipeline_parallel_size
    device: str = "cpu"

    def __len__(self) -> int:
        return len(self.caches) * len(self.threads) * len(self.cases)

    @property
    def max_batch_size(self) -> int:
        return max(case.batch_size for case in self.cases)

    @property
    def step_tokens(self) -> int:
        """New tokens in a step. A batch of short prompts is read in one, or its first sequence would end too early."""
        short = [case for case in self.cases if case.new_tokens and case.prompt_length <= WORTH_WAITING]
        at_once = max((case.batch_size * case.prompt_length for case in short), default=0)
        return max(load_backend(self.device, "auto").MAX_STEP_TOKENS, self.max_batch_size, at_once)


@dataclass(frozen=True)
class Test:
    """A measured case."""

    dtype: str
    threads: int
    case: Case
    measurement: Measurement
    ended: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


def make_plan(
    model: str,
    dtypes: Sequence[str],
    threads: Sequence[int | None],
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    new_tokens: Sequence[int],
    repetitions: int,
    ranks: tuple[int, int] = (1, 1),
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
) -> Plan:
    """Return the cases from small to large. Raise RequestError or CheckpointError if one cannot be measured."""
    _check_numbers("--batch-sizes", batch_sizes, 1)
    _check_numbers("--prompt-lengths", prompt_lengths, 1)
    _check_numbers("--repetitions", [repetitions], 1)
    _check_numbers("--new-tokens", set(new_tokens) - {0}, 2, ", or 0 for no generation")
    counts = tuple(dict.fromkeys(map(thread_count, threads)))
    args = LLMArgs(
        model,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=ranks[0],
        pipeline_parallel_size=ranks[1],
    )
    sources = open_sources(args, dtypes)
    caches = {source.dtype: source.kv_cache_dtype for source in sources}
    config = sources[0].config
    cases = tuple(
        Case(batch_size, prompt_length, count)
        for batch_size in sorted(set(batch_sizes))
        for prompt_length in sorted(set(prompt_lengths))
        for count in (0, *sorted(set(new_tokens) - {0}))
    )
    longest = max(cases, key=lambda case: case.length)
    if longest.length > config.n_positions:
        sizes = f"a prompt of {longest.prompt_length} tokens and {max(longest.new_tokens, 1)} after it"
        raise RequestError(f"{sizes} take {longest.length} positions and {model} has {config.n_positions}.")
    return Plan(model, caches, counts, cases, repetitions, config, ranks, device)


def _check_numbers(flag: str, numbers: Collection[int], least: int, also: str = "") -> None:
    for number in numbers:
        if number < least:
            raise RequestError(f"{flag} gives {number} and must give {least} or more{also}.")


def run_plan(plan: Plan, records: list[Record], tell: Callable[[str], None]) -> None:
    """Append a record of each case to `records`, also if interrupted; tell the speed of each case once measured.

    Records are made at the end: their shares are of the best limits measured before, between and after the cases.
    """
    tests: list[Test] = []
    limits: dict[int, MachineLimits] = {}
    try:
        # disable=None: no bar if stderr is not a terminal.
        with tqdm(total=len(plan), unit="case", disable=None) as bar:
            for dtype, threads in [(dtype, threads) for dtype in plan.caches for threads in plan.threads]:
                meter = meter_of(plan.device)
                _update_limits(limits, plan, dtype, threads)
                sizes = {"max_num_seqs": plan.max_batch_size, "max_num_batched_tokens": plan.step_tokens}
                sizes |= {"max_model_len": max(case.length for case in plan.cases), "prefix_cache_seqs": 0}
                sizes |= {"tensor_parallel_size": plan.ranks[0], "pipeline_parallel_size": plan.ranks[1]}
                cache = plan.caches[dtype]
                with LLM(
                    plan.model, dtype, threads=threads, device=plan.device, kv_cache_dtype=cache, **sizes
                ) as llm:
                    for case in plan.cases:
                        bar.set_description_str(f"{dtype}, {threads_text(threads)}, {case}")
                        tests.append(Test(dtype, threads, case, run_case(llm, case, plan.repetitions, meter)))
                        bar.update()
                        with tqdm.external_write_mode(file=sys.stderr):
                            tell(_progress(plan, tests, limits))
                _update_limits(limits, plan, dtype, threads)
    finally:
        records.extend(record_of(plan, test, limits[test.threads]) for test in tests)


def _update_limits(limits: dict[int, MachineLimits], plan: Plan, dtype: str, threads: int) -> None:
    now = measure_limits(dtype, threads, plan.device)
    limits[threads] = now.best(limits.get(threads, now))


def _progress(plan: Plan, tests: list[Test], limits: dict[int, MachineLimits]) -> str:
    record = record_of(plan, tests[-1], limits[tests[-1].threads])
    case = f"{record['dtype']}, {threads_text(record['n_threads'])}, batch {record['batch_size']}, {record['test']}"
    return f"{len(tests)} of {len(plan)}: {case}: {record['median_ts']:.1f} tokens/s"


def record_of(plan: Plan, test: Test, limits: MachineLimits) -> Record:
    """Return the record of a test, with llama-bench's keys and the keys of this module's docstring."""
    config = plan.config
    case = test.case
    dtype = test.dtype
    found = test.measurement
    counts = (0, case.new_tokens, case.prompt_length) if case.new_tokens else (case.prompt_length, 0, 0)
    n_prompt, n_gen, n_depth = counts
    gpu = meter_of(plan.device).gpu
    (commit, number) = build()
    passes = [_work(plan, test, run) for run in found.runs]
    rates = [tokens / seconds for seconds, tokens, *_ in passes]
    # llama-bench times all tokens: a generation has one pass less than new tokens.
    times = [round(1e9 * case.batch_size * (n_prompt + n_gen) / rate) for rate in rates]
    block_rate, head_rate = map(limits.tile_rates.get, roofline.tiles_of(dtype, plan.device))
    read = statistics.median(bytes_read / seconds for seconds, _, bytes_read, *_ in passes)
    operations = [(blocks + head) / seconds for seconds, *_, blocks, head in passes]
    peak_shares = [(blocks / block_rate + head / head_rate) / seconds for seconds, *_, blocks, head in passes]
    together = case.batch_size if n_gen else 1
    size = roofline.num_parameters(config)
    cache = CACHE_NAMES[plan.caches[dtype]]
    model_type = f"gpt2 {parameters_text(size)} {DTYPE_NAMES[dtype]}"
    return {
        "build_commit": commit,
        "build_number": number,
        "cpu_info": cpu_name(),
        "gpu_info": gpu,
        "backends": "CUDA" if gpu else "CPU",
        "model_filename": plan.model,
        "model_type": model_type,
        "model_size": roofline.model_bytes(config, dtype),
        "model_n_params": size,
        "n_batch": plan.step_tokens,
        "n_ubatch": plan.step_tokens,
        "n_threads": test.threads,
        "type_k": cache,
        "type_v": cache,
        **UNUSED_FIELDS,
        **({} if plan.ranks == (1, 1) else {"split_mode": "tensor {} x pipeline {}".format(*plan.ranks)}),
        **({"n_gpu_layers": config.n_layer} if gpu else {}),
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "test_time": test.ended.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(times)),
        "stddev_ns": round(_deviation(times)),
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": _deviation(rates),
        "samples_ns": times,
        "samples_ts": rates,
        "median_ts": statistics.median(rates),
        "low_ts": min(rates),
        "high_ts": max(rates),
        "test": f"tg{n_gen} @ d{n_depth}" if n_gen else f"pp{n_prompt}",
        "dtype": dtype,
        "kv_cache_dtype": plan.caches[dtype],
        "batch_size": case.batch_size,
        "read_gbs": read / 1e9,
        "bandwidth_share": read / limits.bandwidth,
        "bandwidth_gbs": limits.bandwidth / 1e9,
        "gflops": statistics.median(operations) / 1e9,
        "peak_share": statistics.median(peak_shares),
        "block_peak_gflops": block_rate / 1e9,
        "head_peak_gflops": head_rate / 1e9,
        "ms_per_token": statistics.median(1e3 * together / rate for rate in rates),
        "first_token_ms": None if n_gen else 1e3 * statistics.median(run.first_token for run in found.runs),
        "outside_share": statistics.median(
            1 - (run.prompt + run.generation) / run.total for run in found.runs
        ),
        "sampling_share": statistics.median(run.sampling / run.total for run in found.runs),
        "peak_memory": found.peak_memory or None,
    }


def _work(plan: Plan, test: Test, run: Run) -> tuple[float, int, float, float, float]:
    """Return seconds, tokens, bytes read, and operations of the blocks and of the head, of the passes that count.

    In a generation these are the passes in which the whole batch decodes.
    """
    config = plan.config
    case = test.case
    dtype = test.dtype
    if not case.new_tokens:
        tokens = case.batch_size * case.prompt_length
        num_logit_passes = min(run.num_prompt_steps, case.batch_size)  # passes in which a prompt ends
        read = roofline.weight_bytes(config, dtype, run.num_prompt_steps, num_logit_passes)
        blocks = roofline.block_operations(config, tokens, (case.prompt_length + 1) / 2)
        return run.prompt, tokens, read, blocks, roofline.head_operations(config, case.batch_size)
    tokens = run.num_together * case.batch_size
    attended = case.prompt_length + case.new_tokens / 2  # by a token, on average
    read = roofline.weight_bytes(config, dtype, run.num_together)
    read += roofline.kv_cache_bytes(config, plan.caches[dtype], tokens * attended)
    blocks = roofline.block_operations(config, tokens, attended)
    return run.together, tokens, read, blocks, roofline.head_operations(config, tokens)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@functools.cache
def build() -> tuple[str, int]:
    """Return the commit of a checkout, with "+" if files changed, and its number; else the version and 0."""
    root = Path(tinygpt.__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if (root / ".git").exists():
            commit = git("describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*")
            return commit, int(git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):  # no git, or a folder that git does not trust
        pass
    return tinygpt.__version__, 0
