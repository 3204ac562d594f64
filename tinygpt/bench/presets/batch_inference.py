"""batch-inference: 100 queries of 64 new tokens, eight at a time against one at a time.

The study is Microsoft's, of a library that batches the queries that wait. Its figures are on the page "GPT Completion"
of its documentation: on an RTX 2080 Ti in the version of commit ca20ab04, on a V100 in that of commit 5823a2d8.
The library can also keep the model in another process, its RemoteModelHost, of which no figures were published: with
`remote`, the same queries are sent to `tinygpt serve`, through RemoteLLM.
"""

import time
from dataclasses import dataclass, replace

from tinygpt.bench.formats import Record, points_text, runs_text, table
from tinygpt.bench.measure import Measurement, Run
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import ABSENT, PresetReport, Study
from tinygpt.bench.presets.rerun import Rerun, Result, progress, random_prompts
from tinygpt.bench.remote_host import check_server, served
from tinygpt.remote.remote_llm import RemoteLLM
from tinygpt.sampling_params import SamplingParams

STUDY = Study(
    "batch-inference",
    "queries of 64 new tokens, batch 8 against batch 1",
    'microsoft/batch-inference, docs/examples/gpt_completion.rst, "GPT Completion"',
    "by Hugging Face in PyTorch on the GPU that is named",
)
COLUMNS = (
    "Method",
    "Query Count",
    "Execution Time",
    "Throughput comparing to Baseline",
    "Max Batch Size",
    "Avg Batch Size",
    "Generated Token Count",
    "Inference Count",
)


@dataclass(frozen=True)
class Protocol:
    """Query i has the prompt length i % 10: those of the study's ten texts in GPT-2's tokens."""

    num_queries: int = 100
    prompt_lengths: tuple[int, ...] = (3, 9, 27, 10, 10, 9, 12, 9, 14, 4)
    new_tokens: int = 64
    batch_sizes: tuple[int, int] = (1, 8)
    num_warmup_queries: int = 10
    num_callers: int = 64  # of the model that is in another process: the study's threads
    repetitions: int = 3

    @property
    def lengths(self) -> list[int]:
        return [self.prompt_lengths[i % len(self.prompt_lengths)] for i in range(self.num_queries)]


FULL = Protocol()
SMALL = replace(FULL, num_queries=20, repetitions=1)


@dataclass(frozen=True)
class Method:
    """How the queries are run."""

    dtype: str
    batch_size: int
    is_remote: bool = False

    @property
    def where(self) -> str:
        return ", remote" if self.is_remote else ""


@dataclass(frozen=True)
class Published:
    """A row of the study's table; the sizes of a batch are in queries."""

    hardware: str
    method: str
    seconds: float
    throughput: str
    max_batch_size: int
    avg_batch_size: str
    inference_count: int


PUBLISHED = (
    Published("RTX 2080 Ti", "Baseline", 63.05, "1x", 1, "1", 6400),
    Published("RTX 2080 Ti", "With batch-inference", 12.07, "5x", 8, "7.69", 832),
    Published("V100", "Baseline", 78.04, "1x", 1, "1", 6400),
    Published("V100", "With batch-inference", 4.86, "16x", 32, "25", 256),
)


def run(options: PresetOptions, records: list[Record]) -> PresetReport:
    """Measure, and put our rows before the study's."""
    if options.remote:
        check_server()
    rerun, protocol = Rerun.prepare(STUDY, options, records), SMALL if options.small else FULL
    rerun.fitting([(max(protocol.prompt_lengths), protocol.new_tokens)])
    places = (False, True) if options.remote else (False,)
    methods = [Method(*c, is_remote) for c in _cases(rerun, protocol) for is_remote in places]
    results = {method: _measure(rerun, protocol, method) for method in progress(methods)}
    repetitions = next(iter(results.values())).seconds
    notes = [
        "Avg Batch Size: generated tokens / forward passes, as sequences join and leave between any two passes.",
        f"Execution Time of ours: {runs_text(len(repetitions))}; the study does not say how often it ran.",
    ]
    if options.remote:
        notes.append(
            f"remote: the model is in another process, behind `tinygpt serve`, and {protocol.num_callers} connections "
            f"of one RemoteLLM ask for the queries. How many passes it takes, the server does not say ({ABSENT})."
        )
    rows = [*_our_rows(protocol, results), *map(_published_row, PUBLISHED)]
    return rerun.report([table(COLUMNS, rows, COLUMNS[1:])], notes, _picture(rerun.model, protocol, results))


def _cases(rerun: Rerun, protocol: Protocol) -> list[tuple[str, int]]:
    return [(dtype, size) for dtype in rerun.options.dtypes for size in protocol.batch_sizes]


def _measure(rerun: Rerun, protocol: Protocol, method: Method) -> Result:
    longest = max(protocol.prompt_lengths) + protocol.new_tokens
    if method.is_remote:
        sizes = {"max_num_seqs": method.batch_size, "max_model_len": longest, "prefix_cache_seqs": 0}
        flags = {**sizes, "threads": rerun.options.threads}
        with served(rerun.options.model, method.dtype, protocol.num_callers, **flags) as remote:
            return _measure_remote(rerun, protocol, method, remote)
    with rerun.opened(method.dtype, method.batch_size, longest) as llm:
        warmup = random_prompts(protocol.lengths, llm.config.vocab_size)[: protocol.num_warmup_queries]
        llm.generate(warmup, SamplingParams(max_tokens=protocol.new_tokens), use_tqdm=False)
        sizes = method.batch_size, protocol.lengths, protocol.new_tokens, protocol.repetitions
        return rerun.measure(llm, *sizes, warmups=0, remote=False)


def _measure_remote(rerun: Rerun, protocol: Protocol, method: Method, remote: RemoteLLM) -> Result:
    params = SamplingParams(max_tokens=protocol.new_tokens, ignore_eos=True)
    prompts = random_prompts(protocol.lengths, rerun.config.vocab_size)
    remote.generate(prompts[: protocol.num_warmup_queries], params)
    runs = tuple(_run(remote, prompts, params) for _ in range(rerun.options.repetitions or protocol.repetitions))
    found = Measurement(runs, len(prompts), max(protocol.prompt_lengths), protocol.new_tokens, peak_memory=0)
    return rerun.keep(Result(method.dtype, method.batch_size, found), remote=True, num_steps=None)


def _run(remote: RemoteLLM, prompts: list[list[int]], params: SamplingParams) -> Run:
    """The whole of it, for of a server's passes nothing is known here."""
    start = time.perf_counter()
    outputs = remote.generate(prompts, params)
    total = time.perf_counter() - start
    first_token = max(output.metrics.first_token for output in outputs) - start
    return Run(prompt=0.0, generation=0.0, sampling=0.0, first_token=first_token, total=total, num_steps=0)


def _our_rows(protocol: Protocol, results: dict[Method, Result]) -> list[list[str]]:
    baseline = {method: results[Method(method.dtype, protocol.batch_sizes[0])].median for method in results}
    return [_our_row(protocol, *item, baseline[item[0]] / item[1].median) for item in results.items()]


def _our_row(protocol: Protocol, method: Method, result: Result, speed_up: float) -> list[str]:
    tokens, passes = protocol.num_queries * protocol.new_tokens, result.measurement.runs[-1].num_steps
    average, passes = (ABSENT, ABSENT) if method.is_remote else (f"{tokens / passes:.3g}", str(passes))
    name = f"tinygpt, {method.dtype}, batch {method.batch_size}{method.where}"
    times = str(protocol.num_queries), f"{result.median:.2f}s", f"{speed_up:.2g}x"
    return [name, *times, str(method.batch_size), average, str(tokens), passes]


def _published_row(row: Published) -> list[str]:
    counts = str(row.max_batch_size), row.avg_batch_size, "6400", str(row.inference_count)
    return [f"{row.method}, {row.hardware}", "100", f"{row.seconds}s", row.throughput, *counts]


def _picture(model: str, protocol: Protocol, results: dict[Method, Result]) -> Picture:
    tokens = protocol.num_queries * protocol.new_tokens
    lines: dict[str, list[Point]] = {}
    for method, result in results.items():
        rates = [tokens / seconds for seconds in result.seconds]
        lines.setdefault(f"tinygpt, {method.dtype}{method.where}", []).append(Point.of(method.batch_size, rates))
    drawn = [Line(label, tuple(points)) for label, points in lines.items()]
    for hardware in dict.fromkeys(row.hardware for row in PUBLISHED):
        rows = [row for row in PUBLISHED if row.hardware == hardware]
        points = tuple(Point.exact(row.max_batch_size, 6400 / row.seconds) for row in rows)
        drawn.append(Line(f"published: {STUDY.model}, {hardware}", points, is_published=True))
    panel = Panel("", "largest batch (sequences)", "generated tokens/s", tuple(drawn))
    title = f"{protocol.num_queries} queries of {protocol.new_tokens} new tokens, {model}"
    count = len(next(iter(results.values())).seconds)
    return Picture(title, (panel,), f"{points_text(count)}\nPublished: {STUDY.source}.")
