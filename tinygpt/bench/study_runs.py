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

from tinygpt.bench.measure import Measurement, Run, measure, meter_of, random_prompts
from tinygpt.bench.plot import Lines, Panel, draw
from tinygpt.bench.report import Record, parameters_text, runs_text, table, threads_text
from tinygpt.bench.studies import ABSENT, NUM_CALLERS, NUM_CHARACTERS, Result, Study, StudyCase
from tinygpt.bench.work import num_parameters
from tinygpt.engine.model_source import ModelSource, load_tokenizer
from tinygpt.errors import CheckpointError, RequestError, how_to_install, invalid
from tinygpt.evaluation.tasks import NUM_TOGETHER, perplexity
from tinygpt.evaluation.texts import read_text
from tinygpt.hardware import cpu_name, thread_count
from tinygpt.llm import LLM
from tinygpt.remote import KEY_VARIABLE, RemoteLLM
from tinygpt.sampling_params import SamplingParams
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.open import open_checkpoint

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


def run_study(study: Study, options: Options, results: list[Result]) -> list[str]:
    """Append each measured case to `results`, also if interrupted. Return notes on cases that were left out.

    Raises RequestError or CheckpointError, before any work, if the study cannot run.
    """
    text = _checked_text(study, options)
    sources = ModelSource.open_all(options.model, options.dtypes, options.device)
    cases = study.small if options.small else study.cases
    n_positions = sources[0].config.n_positions
    fitting = [case for case in cases if case.length <= n_positions]
    named = ", ".join(f"{max(case.prompt_lengths)} + {case.new_tokens}" for case in cases if case not in fitting)
    left_out = [f"Left out: {named} tokens do not fit the {n_positions} positions of {options.model}."] * bool(named)
    if not fitting:
        raise RequestError(left_out[0])
    for dtype in dict.fromkeys(source.dtype for source in sources):
        groups = [[case] for case in fitting] if study.has_llm_per_case else [fitting]
        for group in tqdm(groups, unit="model", disable=None):
            _run_local(study, options, dtype, group, text, results)
        if options.remote:
            for case in fitting:
                _run_remote(study, options, dtype, case, sources[0].config, results)
    return left_out


def _checked_text(study: Study, options: Options) -> str | None:
    thread_count(options.threads)
    if options.repetitions is not None and options.repetitions < 1:
        raise invalid("--repetitions", options.repetitions, "at least 1")
    if options.text is not None and study.name != "onnx-study":
        raise RequestError(f"--text is for the perplexity of onnx-study and {study.name} has none.")
    if options.remote and study.name != "batch-inference":
        raise RequestError(f"--remote is for batch-inference and {study.name} has no such case.")
    if options.remote:
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
        raise RequestError(f"--text needs a tokenizer and {options.model} has none that can be used.") from None
    return text


def _run_local(
    study: Study, options: Options, dtype: str, cases: list[StudyCase], text: str | None, results: list[Result]
) -> None:
    sizes = {"max_num_seqs": max(case.batch_size for case in cases), "prefix_cache_seqs": 0}
    if text is None:
        sizes["max_model_len"] = max(case.length for case in cases)
    else:
        sizes["max_num_seqs"] = max(sizes["max_num_seqs"], NUM_TOGETHER)
    meter = meter_of(options.device)
    with LLM(options.model, dtype, threads=options.threads, device=options.device, **sizes) as llm:
        quality = None if text is None else perplexity(llm, text).token_perplexity
        for case in tqdm(cases, unit="case", disable=None):
            prompts = random_prompts(case.prompt_lengths, llm.config.vocab_size)
            params = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True, **study.sampling)
            for _ in range(meter.warmups):
                llm.generate(prompts[: max(case.batch_size, NUM_WARMUP_PROMPTS)], params, use_tqdm=False)
            repetitions = options.repetitions or study.repetitions[options.small]
            found = measure(llm, prompts, case.new_tokens, repetitions, 0, params, meter)
            results.append(Result(dtype, case, found, _baseline(results, dtype, False), False, quality))


def _run_remote(
    study: Study, options: Options, dtype: str, case: StudyCase, config: ModelConfig, results: list[Result]
) -> None:
    prompts = random_prompts(case.prompt_lengths, config.vocab_size)
    params = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True, **study.sampling)
    flags = {"max_num_seqs": case.batch_size, "max_model_len": case.length, "prefix_cache_seqs": 0}
    flags["threads"] = options.threads
    with served(options.model, dtype, flags) as (url, _), RemoteLLM(url, max_connections=NUM_CALLERS) as remote:
        remote.generate(prompts[:NUM_WARMUP_PROMPTS], params)
        runs = []
        for _ in range(options.repetitions or study.repetitions[options.small]):
            start = time.perf_counter()
            outputs = remote.generate(prompts, params)
            total = time.perf_counter() - start
            runs.append(Run(0.0, 0.0, 0.0, max(o.metrics.first_token for o in outputs) - start, total, num_steps=0))
    found = Measurement(tuple(runs), len(prompts), max(case.prompt_lengths), case.new_tokens, peak_memory=0)
    results.append(Result(dtype, case, found, _baseline(results, dtype, True), is_remote=True))


def _baseline(results: list[Result], dtype: str, is_remote: bool) -> float | None:
    return next((r.median for r in results if (r.dtype, r.is_remote) == (dtype, is_remote)), None)


@contextmanager
def served(model: str, dtype: str, flags: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """Serve a model in another process; yield its URL and process id. Raise RequestError if it does not start."""
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "0", "--model", model, "--dtype", dtype]
    for name, value in flags.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    with started(command, env={name: value for name, value in os.environ.items() if name != KEY_VARIABLE}) as found:
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


def study_text(study: Study, options: Options, results: list[Result], notes: list[str]) -> str:
    """Return the study's page: our rows, next to or above the published figures, and notes."""
    header = [*study.columns, *(f"published: {title}" for title in study.published_columns)]
    absent = (ABSENT,) * len(study.published_columns)
    rows = [
        [*(cell(r) for cell in study.columns.values()), *map(str, study.published.get(r.case.key, absent))]
        for r in results
    ]
    count = len(results[0].seconds)
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
    size, gpu = num_parameters(open_checkpoint(options.model).config), meter_of(options.device).gpu
    machine = gpu or f"{threads_text(thread_count(options.threads))} of {cpu_name()}"
    small = ", with fewer sizes and runs than the study has" * options.small
    is_other = abs(size / study.num_parameters - 1) > SAME_SIZE
    other = f". This is another size than the study's {study.model}, so the figures are not of the same work" * is_other
    return f"{Path(options.model).name}, {parameters_text(size)} parameters, {machine}{small}{other}"


def records_of(study: Study, options: Options, results: list[Result]) -> list[Record]:
    """Return a record for each case, with llama-bench's keys as far as they go; times are of the whole generate."""
    shared = {"preset": study.name, "model_filename": options.model, "gpu_info": meter_of(options.device).gpu}
    shared["n_threads"] = thread_count(options.threads)
    return [shared | _record(study, result) for result in results]


def _record(study: Study, result: Result) -> Record:
    samples, found = [round(1e9 * seconds) for seconds in result.seconds], result.measurement
    record = {"dtype": result.dtype, "batch_size": result.case.batch_size, "num_prompts": found.batch_size}
    record |= {"n_prompt": found.prompt_length, "n_gen": found.new_tokens, "num_steps": result.num_steps}
    record |= {"avg_ns": round(statistics.mean(samples)), "samples_ns": samples}
    record |= {"stddev_ns": round(statistics.stdev(samples)) if len(samples) > 1 else 0}
    record |= {"first_token_ns": [round(1e9 * seconds) for seconds in result.first_tokens]}
    record |= {"peak_memory": found.peak_memory or None}
    record |= {"remote": result.is_remote} if study.name == "batch-inference" else {}
    return record | ({"perplexity": result.perplexity} if study.name == "onnx-study" else {})


def draw_study(study: Study, options: Options, results: list[Result], path: Path) -> None:
    """Draw our results and the published figures. Raise RequestError as `plot.check` does."""
    lines: Lines = {}
    has_lengths = len({result.case.key[1:] for result in results}) > 1
    for result in results:
        lengths = f", prompt of {result.case.key[1]}" if has_lengths else ""
        lines.setdefault(result.name + lengths, []).append((study.x[1](result), study.y[1](result)))
    published: Lines = {
        f"published: {study.model}, {name}": [(x, [y]) for x, y in points]
        for name, points in study.published_lines.items()
    }
    panel = Panel("", study.x[0], study.y[0], lines, published)
    title = f"{study.name}, {Path(options.model).name}"
    draw(path, title, [panel], f"Published: {study.source}.")
