"""Measure a published study on this machine, and return its table, records and picture."""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..engine.model_runner import ModelSource, load_tokenizer
from ..errors import CheckpointError, RequestError, how_to_install, invalid
from ..evaluation.tasks import NUM_TOGETHER, perplexity
from ..evaluation.texts import read_text
from ..hardware import cpu_name, thread_count
from ..llm import LLM
from ..llm_args import LLMArgs
from ..remote import KEY_VARIABLE, RemoteLLM
from ..sampling_params import SamplingParams
from ..weights.open import open_checkpoint
from .measure import measure, meter_of, random_prompts
from .plot import Lines, Panel, draw
from .report import Record, cells_of, parameters_text, runs_text, table, threads_text
from .roofline import num_parameters
from .studies import ABSENT, NUM_CALLERS, NUM_CHARACTERS, Study, StudyCase

NUM_WARMUP_PROMPTS = 10  # at least, of a warm-up
SAME_SIZE = 0.1  # relative difference of models of one size


@dataclass(frozen=True)
class Options:
    """Choices of the user. repetitions: None is the study's number. text: a file, for perplexity."""

    model: str
    dtypes: tuple[str, ...] = ("auto",)
    threads: int | None = None
    repetitions: int | None = None
    small: bool = False
    text: str | Path | None = None
    remote: bool = False
    device: str = "cpu"


def run_study(study: Study, options: Options, records: list[Record]) -> list[str]:
    """Append a record of each case to `records`, also if interrupted. Return notes on cases that were left out.

    Raises RequestError or CheckpointError, before any work, if the study cannot run.
    """
    text = _checked_text(study, options)
    sources = ModelSource.open_all(LLMArgs(options.model, device=options.device), options.dtypes)
    cases = study.small if options.small else study.cases
    n_positions = sources[0].config.n_positions
    fitting = [case for case in cases if case.length <= n_positions]
    named = ", ".join(
        f"{max(case.prompt_lengths)} + {case.new_tokens}" for case in cases if case not in fitting
    )
    left_out = [
        f"Left out: {named} tokens do not fit the {n_positions} positions of {options.model}."
    ] * bool(named)
    if not fitting:
        raise RequestError(left_out[0])
    for dtype in dict.fromkeys(source.dtype for source in sources):
        more = {"perplexity": _perplexity(options, dtype, text)} if study.name == "onnx-study" else {}
        for case in tqdm(fitting, unit="case", disable=None):
            records.append(_run_local(study, options, dtype, case) | more)
        if options.remote:
            for case in fitting:
                records.append(_run_remote(study, options, dtype, case, sources[0].config.vocab_size))
    return left_out


def _checked_text(study: Study, options: Options) -> str | None:
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
    if options.text is None:
        return None
    text = read_text("--text", options.text)[:NUM_CHARACTERS]
    try:
        load_tokenizer(open_checkpoint(options.model))
    except CheckpointError:
        raise RequestError(
            f"--text needs a tokenizer and {options.model} has none that can be used."
        ) from None
    return text


def _perplexity(options: Options, dtype: str, text: str | None) -> float | None:
    if text is None:
        return None
    how = {"threads": options.threads, "device": options.device, "max_num_seqs": NUM_TOGETHER}
    with LLM(options.model, dtype, **how) as llm:
        return perplexity(llm, text).token_perplexity


def _run_local(study: Study, options: Options, dtype: str, case: StudyCase) -> Record:
    meter = meter_of(options.device)
    with LLM(options.model, dtype, threads=options.threads, device=options.device, **case.sizes) as llm:
        prompts, params = _work(study, case, llm.config.vocab_size)
        for _ in range(meter.warmups):
            llm.generate(prompts[: max(case.batch_size, NUM_WARMUP_PROMPTS)], params, use_tqdm=False)
        found = measure(llm, prompts, params, options.repetitions or study.repetitions[options.small], meter)
    times = [(run.total, run.first_token) for run in found.runs]
    more = {"num_steps": found.runs[-1].num_steps, "peak_memory": found.peak_memory or None}
    return _record(study, options, dtype, case, times, **more)


def _run_remote(study: Study, options: Options, dtype: str, case: StudyCase, vocab_size: int) -> Record:
    prompts, params = _work(study, case, vocab_size)
    flags = case.sizes | {"threads": options.threads}
    with (
        served(options.model, dtype, flags) as (url, _),
        RemoteLLM(url, max_connections=NUM_CALLERS) as remote,
    ):
        remote.generate(prompts[:NUM_WARMUP_PROMPTS], params)
        times = []
        for _ in range(options.repetitions or study.repetitions[options.small]):
            start = time.perf_counter()
            outputs = remote.generate(prompts, params)
            total = time.perf_counter() - start
            times.append((total, max(output.metrics.first_token for output in outputs) - start))
    return _record(study, options, dtype, case, times, remote=True)


def _work(study: Study, case: StudyCase, vocab_size: int) -> tuple[list[list[int]], SamplingParams]:
    params = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True, **study.sampling)
    return random_prompts(case.prompt_lengths, vocab_size), params


def _record(
    study: Study, options: Options, dtype: str, case: StudyCase, times: list[tuple[float, float]], **more: Any
) -> Record:
    """Return llama-bench's keys as far as they go. times: seconds of each generate, and to its last first token."""
    samples, first_tokens = (
        [round(1e9 * seconds) for seconds in column] for column in zip(*times, strict=True)
    )
    record = {
        "preset": study.name,
        "model_filename": options.model,
        "gpu_info": meter_of(options.device).gpu,
        "n_threads": thread_count(options.threads),
        "dtype": dtype,
        "batch_size": case.batch_size,
        "num_prompts": len(case.prompt_lengths),
        "n_prompt": max(case.prompt_lengths),
        "n_gen": case.new_tokens,
        "num_steps": None,
        "avg_ns": round(statistics.mean(samples)),
        "samples_ns": samples,
        "stddev_ns": round(statistics.stdev(samples)) if len(samples) > 1 else 0,
        "first_token_ns": first_tokens,
        "peak_memory": None,
    }
    return record | ({"remote": False} if study.name == "batch-inference" else {}) | more


def derived(records: list[Record]) -> list[Record]:
    """Return records with the fields that columns and axes of studies show.

    speedup: over the first record of the dtype, here or remote.
    """
    found, baselines = [], {}
    for record in records:
        n_gen = record["n_gen"]
        num_steps = record["num_steps"]
        is_remote = record.get("remote", False)
        seconds, first_tokens = (
            [ns / 1e9 for ns in record[name]] for name in ("samples_ns", "first_token_ns")
        )
        rest = [total - first for total, first in zip(seconds, first_tokens, strict=True)]
        num_tokens = record["num_prompts"] * n_gen
        median = statistics.median(seconds)
        error = f" ± {statistics.stdev(seconds) / len(seconds) ** 0.5:.4f}" if len(seconds) > 1 else ""
        samples = {
            "seconds": seconds,
            "milliseconds": [1e3 * total for total in seconds],
            "tokens_per_s": [num_tokens / total for total in seconds],
            "tokens_per_ms": [num_tokens / (1e3 * total) for total in seconds],
        }
        more = {
            "name": f"tinygpt, {record['dtype']}" + ", remote" * is_remote,
            "num_tokens": num_tokens,
            "mean_and_error": f"{statistics.mean(seconds):.4f}{error}",
            "fastest_s": min(seconds),
            "speedup": baselines.setdefault((record["dtype"], is_remote), median) / median,
            "tokens_per_step": num_steps and num_tokens / num_steps,
            "ms_per_token": 1e3 * median / n_gen,
            "first_token_ms": 1e3 * statistics.median(first_tokens),
            "later_token_ms": 1e3 * statistics.median(rest) / max(n_gen - 1, 1),
            "memory_gb": record["peak_memory"] and record["peak_memory"] / 1e9,
        }
        medians = {f"median_{name}": statistics.median(values) for name, values in samples.items()}
        found.append({**record, **samples, **medians, **more})
    return found


@contextmanager
def served(model: str, dtype: str, flags: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """Serve a model in another process; yield its URL and process id. Raise RequestError if it does not start."""
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


def study_text(study: Study, options: Options, records: list[Record], notes: list[str]) -> str:
    """Return the study's page: our rows, next to or above the published figures, and notes."""
    header = [*study.columns, *(f"published: {title}" for title in study.published_columns)]
    absent = (ABSENT,) * len(study.published_columns)
    rows = []
    for record in derived(records):
        published = study.published.get((record["batch_size"], record["n_prompt"], record["n_gen"]), absent)
        rows.append([*cells_of(record, study.columns.values(), ABSENT), *map(str, published)])
    count = len(records[0]["samples_ns"])
    about = "random prompts of the study's lengths, none cached; tokenization and warm-up are not timed"
    lines = (f"Ours: {runs_text(count)}; {about}.", *notes, *study.notes)
    parts = (
        f"## {study.name}",
        f"Published: {study.source}; {study.model}, {study.hardware}.",
        f"Here: {_here(study, options)}.",
        table(header, [*rows, *map(list, study.published_rows)], header[1:]),
        "\n".join(f"- {line}" for line in lines),
    )
    return "\n\n".join(parts)


def _here(study: Study, options: Options) -> str:
    size = num_parameters(open_checkpoint(options.model).config)
    gpu = meter_of(options.device).gpu
    machine = gpu or f"{threads_text(thread_count(options.threads))} of {cpu_name()}"
    small = ", with fewer sizes and runs than the study has" * options.small
    is_other = abs(size / study.num_parameters - 1) > SAME_SIZE
    other = (
        f". This is another size than the study's {study.model}, so the figures are not of the same work"
        * is_other
    )
    return f"{Path(options.model).name}, {parameters_text(size)} parameters, {machine}{small}{other}"


def draw_study(study: Study, options: Options, records: list[Record], path: Path) -> None:
    """Draw our results and the published figures. Raise RequestError as `plot.check` does."""
    lines: Lines = {}
    has_lengths = len({(record["n_prompt"], record["n_gen"]) for record in records}) > 1
    for record in derived(records):
        lengths = f", prompt of {record['n_prompt']}" if has_lengths else ""
        lines.setdefault(record["name"] + lengths, []).append((record[study.x[1]], record[study.y[1]]))
    published: Lines = {
        f"published: {study.model}, {name}": [(x, [y]) for x, y in points]
        for name, points in study.published_lines.items()
    }
    panel = Panel("", study.x[0], study.y[0], lines, published)
    title = f"{study.name}, {Path(options.model).name}"
    draw(path, title, [panel], f"Published: {study.source}.")
