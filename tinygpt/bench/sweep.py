"""Measure the cases of `tinygpt bench` and of published studies, checked before any work."""

import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

import tinygpt

from ..engine.model_runner import ModelSource, load_backend, load_tokenizer
from ..engine.scheduler import WORTH_WAITING
from ..errors import CheckpointError, RequestError, how_to_install, invalid
from ..evaluation.tasks import NUM_TOGETHER, perplexity
from ..hardware import cpu_name, thread_count
from ..llm import LLM
from ..llm_args import LLMArgs
from ..ranks.lead import open_sources
from ..remote import KEY_VARIABLE, RemoteLLM
from ..weights.config import PRECISIONS, ModelConfig
from ..weights.open import open_checkpoint
from . import roofline
from .measure import NUM_WARMUP_PROMPTS, measure, meter_of, params_of, random_prompts
from .report import Record, deviation, parameters_text, threads_text
from .roofline import Case, MachineLimits, Run, measure_limits
from .studies import NUM_CALLERS, NUM_CHARACTERS, Options, Study

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
    sampling: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.caches) * len(self.threads) * len(self.cases)

    @property
    def max_batch_size(self) -> int:
        return max(case.batch_size for case in self.cases)

    @property
    def step_tokens(self) -> int:
        """New tokens in a step. A batch of short prompts is read in one, or its first sequence would end too early."""
        short = [case for case in self.cases if case.is_at_depth and case.prompt_length <= WORTH_WAITING]
        at_once = max((case.batch_size * case.prompt_length for case in short), default=0)
        return max(load_backend(self.device, "auto").MAX_STEP_TOKENS, self.max_batch_size, at_once)

    @property
    def sizes(self) -> dict[str, int]:
        """Return arguments of an LLM, which has no prefix cache."""
        return {
            "max_num_seqs": self.max_batch_size,
            "max_num_batched_tokens": self.step_tokens,
            "max_model_len": max(case.length for case in self.cases),
            "prefix_cache_seqs": 0,
            "tensor_parallel_size": self.ranks[0],
            "pipeline_parallel_size": self.ranks[1],
        }


@dataclass(frozen=True)
class Test:
    dtype: str
    threads: int
    case: Case
    runs: tuple[Run, ...]
    peak_memory: int  # bytes of the process, or of the GPU; 0 if unknown
    gpu: str = ""
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
        Case(batch_size, (prompt_length,) * batch_size, count, is_at_depth=count > 0)
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


def run(plan: Plan, dtype: str, threads: int) -> Iterator[Test]:
    meter = meter_of(plan.device)
    how = {"threads": threads, "device": plan.device, "kv_cache_dtype": plan.caches[dtype], **plan.sizes}
    with LLM(plan.model, dtype, **how) as llm:
        for case in plan.cases:
            runs = measure(llm, case, plan.repetitions, meter, **plan.sampling)
            yield Test(dtype, threads, case, runs, meter.peak_memory(), meter.gpu)


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
                bar.set_description_str(f"{dtype}, {threads_text(threads)}")
                _update_limits(limits, plan, dtype, threads)
                for test in run(plan, dtype, threads):
                    tests.append(test)
                    bar.update()
                    with tqdm.external_write_mode(file=sys.stderr):
                        tell(_progress(plan, tests, limits))
                _update_limits(limits, plan, dtype, threads)
    finally:
        records.extend(record_of(plan, test, limits[test.threads]) for test in tests)


def _update_limits(limits: dict[int, MachineLimits], plan: Plan, dtype: str, threads: int) -> None:
    now = measure_limits(dtype, threads, plan.device)
    limits[threads] = now.best(limits.get(threads, now))


def record_of(plan: Plan, test: Test, limits: MachineLimits) -> Record:
    """Return llama-bench's keys and the keys of this module's docstring."""
    config = plan.config
    case = test.case
    dtype = test.dtype
    n_gen = case.new_tokens
    n_prompt, n_depth = (0, case.prompt_length) if n_gen else (case.prompt_length, 0)
    commit, number = build()
    cache = plan.caches[dtype]
    works = [roofline.work_of(case, run, config, dtype, cache) for run in test.runs]
    rates = [work.tokens / work.seconds for work in works]
    # llama-bench times all tokens: a generation has one pass less than new tokens.
    times = [round(1e9 * case.batch_size * (n_prompt + n_gen) / rate) for rate in rates]
    block_rate, head_rate = map(limits.tile_rates.get, roofline.tiles_of(dtype, plan.device))
    read = statistics.median(work.bytes_read / work.seconds for work in works)
    operations = [(work.in_blocks + work.in_head) / work.seconds for work in works]
    peak_shares = [(work.in_blocks / block_rate + work.in_head / head_rate) / work.seconds for work in works]
    together = case.batch_size if n_gen else 1
    size = roofline.num_parameters(config)
    cache_name = roofline.CACHE_NAMES[cache]
    model_type = f"gpt2 {parameters_text(size)} {PRECISIONS[dtype].label}"
    return {
        "build_commit": commit,
        "build_number": number,
        "cpu_info": cpu_name(),
        "gpu_info": test.gpu,
        "backends": "CUDA" if test.gpu else "CPU",
        "model_filename": plan.model,
        "model_type": model_type,
        "model_size": roofline.model_bytes(config, dtype),
        "model_n_params": size,
        "n_batch": plan.step_tokens,
        "n_ubatch": plan.step_tokens,
        "n_threads": test.threads,
        "type_k": cache_name,
        "type_v": cache_name,
        **UNUSED_FIELDS,
        **({} if plan.ranks == (1, 1) else {"split_mode": "tensor {} x pipeline {}".format(*plan.ranks)}),
        **({"n_gpu_layers": config.n_layer} if test.gpu else {}),
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "test_time": test.ended.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(times)),
        "stddev_ns": round(deviation(times)),
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": deviation(rates),
        "samples_ns": times,
        "samples_ts": rates,
        "median_ts": statistics.median(rates),
        "low_ts": min(rates),
        "high_ts": max(rates),
        "test": f"tg{n_gen} @ d{n_depth}" if n_gen else f"pp{n_prompt}",
        "dtype": dtype,
        "kv_cache_dtype": cache,
        "batch_size": case.batch_size,
        "read_gbs": read / 1e9,
        "bandwidth_share": read / limits.bandwidth,
        "bandwidth_gbs": limits.bandwidth / 1e9,
        "gflops": statistics.median(operations) / 1e9,
        "peak_share": statistics.median(peak_shares),
        "block_peak_gflops": block_rate / 1e9,
        "head_peak_gflops": head_rate / 1e9,
        "ms_per_token": statistics.median(1e3 * together / rate for rate in rates),
        "first_token_ms": None if n_gen else 1e3 * statistics.median(run.first_token for run in test.runs),
        "outside_share": statistics.median(
            1 - (run.prompt + run.generation) / run.total for run in test.runs
        ),
        "sampling_share": statistics.median(run.sampling / run.total for run in test.runs),
        "peak_memory": test.peak_memory or None,
    }


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


def _progress(plan: Plan, tests: list[Test], limits: dict[int, MachineLimits]) -> str:
    record = record_of(plan, tests[-1], limits[tests[-1].threads])
    case = f"{record['dtype']}, {threads_text(record['n_threads'])}, batch {record['batch_size']}, {record['test']}"
    return f"{len(tests)} of {len(plan)}: {case}: {record['median_ts']:.1f} tokens/s"


def run_study(study: Study, options: Options, records: list[Record]) -> list[str]:
    """Append a record of each case to `records`, also if interrupted. Return notes on cases that were left out.

    Raises RequestError or CheckpointError, before any work, if the study cannot run.
    """
    _check(study, options)
    sources = ModelSource.open_all(LLMArgs(options.model, device=options.device), options.dtypes)
    cases = study.small if options.small else study.cases
    n_positions = sources[0].config.n_positions
    fitting = [case for case in cases if case.length <= n_positions]
    named = ", ".join(f"{case.prompt_length} + {case.new_tokens}" for case in cases if case not in fitting)
    left_out = [
        f"Left out: {named} tokens do not fit the {n_positions} positions of {options.model}."
    ] * bool(named)
    if not fitting:
        raise RequestError(left_out[0])
    caches = {source.dtype: source.kv_cache_dtype for source in sources}
    count = options.repetitions or study.repetitions[options.small]
    about = caches, (thread_count(options.threads),)
    more = {"device": options.device, "sampling": study.sampling}
    plans = [Plan(options.model, *about, (case,), count, sources[0].config, **more) for case in fitting]
    for dtype in caches:
        found = {"perplexity": _perplexity(options, dtype)} if study.name == "onnx-study" else {}
        for plan in tqdm(plans, unit="case", disable=None):
            for test in run(plan, dtype, plan.threads[0]):
                records.append(_local_record(study, plan, test) | found)
        if options.remote:
            records.extend(_run_remote(study, plan, dtype, options.threads) for plan in plans)
    return left_out


def _check(study: Study, options: Options) -> None:
    thread_count(options.threads)
    if options.repetitions is not None and options.repetitions < 1:
        raise invalid("--repetitions", options.repetitions, "at least 1")
    if options.text is not None and study.name != "onnx-study":
        raise RequestError(f"--text is for the perplexity of onnx-study and {study.name} has none.")
    if options.remote:
        if study.name != "batch-inference":
            raise RequestError(f"--remote is for batch-inference and {study.name} has no such case.")
        try:
            import tinygpt.server.app  # noqa: F401
        except ImportError as error:
            raise RequestError(f"--remote needs {error.name}: {how_to_install('serve')}.") from None
    if options.text is not None:
        try:
            load_tokenizer(open_checkpoint(options.model))
        except CheckpointError:
            raise RequestError(
                f"--text needs a tokenizer and {options.model} has none that can be used."
            ) from None


def _perplexity(options: Options, dtype: str) -> float | None:
    if options.text is None:
        return None
    how = {"threads": options.threads, "device": options.device, "max_num_seqs": NUM_TOGETHER}
    with LLM(options.model, dtype, **how) as llm:
        return perplexity(llm, options.text[:NUM_CHARACTERS]).token_perplexity


def _run_remote(study: Study, plan: Plan, dtype: str, threads: int | None) -> Record:
    (case,) = plan.cases
    prompts = random_prompts(case.prompt_lengths, plan.config.vocab_size)
    params = params_of(case, prompts, **study.sampling)
    with (
        served(plan.model, dtype, plan.sizes | {"threads": threads}) as (url, _),
        RemoteLLM(url, max_connections=NUM_CALLERS) as remote,
    ):
        remote.generate(prompts[:NUM_WARMUP_PROMPTS], params[:NUM_WARMUP_PROMPTS])
        times = []
        for _ in range(plan.repetitions):
            start = time.perf_counter()
            outputs = remote.generate(prompts, params)
            total = time.perf_counter() - start
            times.append((total, max(output.metrics.first_token for output in outputs) - start))
    return _study_record(study, plan, dtype, times, remote=True)


def _local_record(study: Study, plan: Plan, test: Test) -> Record:
    times = [(run.total, run.first_token) for run in test.runs]
    more = {"num_steps": test.runs[-1].num_steps, "peak_memory": test.peak_memory or None}
    return _study_record(study, plan, test.dtype, times, gpu_info=test.gpu, **more)


def _study_record(
    study: Study, plan: Plan, dtype: str, times: list[tuple[float, float]], **more: Any
) -> Record:
    """Return llama-bench's keys as far as they go. times: seconds of each generate, and to its last first token."""
    (case,) = plan.cases
    samples, first_tokens = (
        [round(1e9 * seconds) for seconds in column] for column in zip(*times, strict=True)
    )
    record = {
        "preset": study.name,
        "model_filename": plan.model,
        "gpu_info": "",
        "n_threads": plan.threads[0],
        "dtype": dtype,
        "batch_size": case.batch_size,
        "num_prompts": len(case.prompt_lengths),
        "n_prompt": case.prompt_length,
        "n_gen": case.new_tokens,
        "num_steps": None,
        "avg_ns": round(statistics.mean(samples)),
        "samples_ns": samples,
        "stddev_ns": round(deviation(samples)),
        "first_token_ns": first_tokens,
        "peak_memory": None,
    }
    return record | ({"remote": False} if study.name == "batch-inference" else {}) | more


@contextmanager
def served(model: str, dtype: str, flags: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """Yield URL and process id of a server. Raise RequestError if it does not start."""
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "0", "--model", model, "--dtype", dtype]
    for name, value in flags.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    with started(
        command, env={name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    ) as found:
        yield found


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[tuple[str, int]]:
    """Run a server's command with options of Popen, as `served` does."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, **options)
        try:
            said, has_ended = "", False
            while (address := re.search(r"serving .* on (http://\S+)", said)) is None:
                if has_ended:
                    raise RequestError(f"the server did not start: {' '.join(said.splitlines()[-1:])}")
                time.sleep(0.05)
                has_ended = process.poll() is not None
                log.seek(0)
                said = log.read()
            yield address[1], process.pid
        finally:
            process.terminate()
            process.wait()
