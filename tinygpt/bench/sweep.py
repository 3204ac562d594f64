"""Measure the cases of `tinygpt bench` and of published studies, checked before any work."""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from ..engine.model_runner import ModelSource, load_tokenizer
from ..errors import CheckpointError, RequestError, how_to_install, invalid
from ..evaluation.tasks import NUM_TOGETHER, perplexity
from ..hardware import thread_count
from ..llm import LLM
from ..llm_args import LLMArgs
from ..remote import KEY_VARIABLE, RemoteLLM
from ..sampling_params import SamplingParams
from ..weights.open import open_checkpoint
from .measure import NUM_WARMUP_PROMPTS, measure, meter_of, params_of, random_prompts
from .plan import Plan
from .record import Measured
from .report import Record, threads_text
from .roofline import MachineLimits, Run, measure_limits
from .studies import NUM_CALLERS, NUM_CHARACTERS, Options, Study


def run(plan: Plan, dtype: str, threads: int) -> Iterator[Measured]:
    meter = meter_of(plan.args.device)
    how = {"dtype": dtype, "threads": threads, "kv_cache_dtype": plan.caches[dtype]}
    with LLM(**vars(replace(plan.args, **how, **plan.sizes))) as llm:
        for case in plan.cases:
            runs = measure(llm, case, plan.repetitions, meter, **plan.sampling)
            yield Measured(plan, dtype, threads, case, runs, meter.peak_memory(), meter.gpu)


def run_plan(plan: Plan, records: list[Record], tell: Callable[[str], None]) -> None:
    """Append a record of each case to `records`, also if interrupted; tell the speed of each case once measured.

    Records are made at the end: their shares are of the best limits measured before, between and after the cases.
    """
    measured: list[Measured] = []
    limits: dict[int, MachineLimits] = {}
    try:
        # disable=None: no bar if stderr is not a terminal.
        with tqdm(total=len(plan), unit="case", disable=None) as bar:
            for dtype, threads in [(dtype, threads) for dtype in plan.caches for threads in plan.threads]:
                bar.set_description_str(f"{dtype}, {threads_text(threads)}")
                _update_limits(limits, plan, dtype, threads)
                for case in run(plan, dtype, threads):
                    measured.append(case)
                    bar.update()
                    with tqdm.external_write_mode(file=sys.stderr):
                        tell(f"{len(measured)} of {len(plan)}: {_speed(case)}")
                _update_limits(limits, plan, dtype, threads)
    finally:
        records.extend(case.to_llama_bench(limits[case.threads]) for case in measured)


def _update_limits(limits: dict[int, MachineLimits], plan: Plan, dtype: str, threads: int) -> None:
    now = measure_limits(dtype, threads, plan.args.device)
    limits[threads] = now.best(limits.get(threads, now))


def _speed(measured: Measured) -> str:
    batch = measured.case.batch_size
    case = f"{measured.dtype}, {threads_text(measured.threads)}, batch {batch}, {measured.name}"
    return f"{case}: {statistics.median(measured.rates):.1f} tokens/s"


def run_study(study: Study, options: Options, records: list[Record]) -> list[str]:
    """Append a record of each case to `records`, also if interrupted. Return notes on cases that were left out.

    Raises RequestError or CheckpointError, before any work, if the study cannot run.
    """
    _check(study, options)
    args = LLMArgs(options.model, device=options.device)
    sources = ModelSource.open_all(args, options.dtypes)
    cases = study.small if options.small else study.cases
    n_positions = sources[0].config.n_positions
    fitting = [case for case in cases if case.length <= n_positions]
    others = [case for case in cases if case not in fitting]
    named = ", ".join(dict.fromkeys(f"{case.prompt_length} + {case.new_tokens}" for case in others))
    left_out = [
        f"Left out: {named} tokens do not fit the {n_positions} positions of {options.model}."
    ] * bool(named)
    if not fitting:
        raise RequestError(left_out[0])
    caches = {source.dtype: source.kv_cache_dtype for source in sources}
    threads = thread_count(options.threads)
    count = options.repetitions or study.repetitions[options.small]
    config = sources[0].config
    plans = [Plan(args, caches, (threads,), (case,), count, config, study.sampling) for case in fitting]
    for dtype in caches:
        more = {"remote": False} if study.name == "batch-inference" else {}
        if study.name == "onnx-study":
            more["perplexity"] = _perplexity(options, dtype)
        for plan in tqdm(plans, unit="case", disable=None):
            for measured in run(plan, dtype, threads):
                records.append(replace(measured, more=more).to_study(study.name))
        if options.remote:
            remote = (_run_remote(plan, dtype, options.threads) for plan in plans)
            records.extend(measured.to_study(study.name) for measured in remote)
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


def _run_remote(plan: Plan, dtype: str, threads: int | None) -> Measured:
    (case,) = plan.cases
    prompts = random_prompts(case.prompt_lengths, plan.config.vocab_size)
    params = params_of(case, prompts, **plan.sampling)
    with (
        served(plan.args.model, dtype, plan.sizes | {"threads": threads}) as (url, _),
        RemoteLLM(url, max_connections=NUM_CALLERS) as remote,
    ):
        remote.generate(prompts[:NUM_WARMUP_PROMPTS], params[:NUM_WARMUP_PROMPTS])
        runs = tuple(_remote_run(remote, prompts, params) for _ in range(plan.repetitions))
    return Measured(plan, dtype, plan.threads[0], case, runs, more={"remote": True})


def _remote_run(remote: RemoteLLM, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
    start = time.perf_counter()
    outputs = remote.generate(prompts, params)
    total = time.perf_counter() - start
    return Run(first_token=max(output.metrics.first_token for output in outputs) - start, total=total)


@contextmanager
def served(model: str, dtype: str, flags: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """Yield URL and process id of a server. Raise RequestError if it does not start."""
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "0", "--model", model, "--dtype", dtype]
    for name, value in flags.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    with started(
        command, env={name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    ) as address:
        yield address


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
