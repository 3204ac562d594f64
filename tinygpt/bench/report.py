"""Records of cases, with llama-bench's keys; records as text, and the comparison of two files of records.

The markdown tables of all commands and scripts are made here.

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

import csv
import functools
import io
import json
import math
import statistics
import string
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinygpt

from ..errors import RequestError
from ..hardware import cpu_name
from ..weights.config import PRECISIONS
from . import roofline

if TYPE_CHECKING:
    from .sweep import Plan, Test

Record = dict[str, Any]

# Title of a column -> its format for a record; `:4` is 4 significant digits.
COLUMNS = {
    "model": "{model_filename}",
    "dtype": "{dtype}",
    "KV cache": "{kv_cache_dtype}",
    "threads": "{n_threads}",
    "batch": "{batch_size}",
    "test": "{test}",
    "tokens/s": "{median_ts:4} ({low_ts:4} to {high_ts:4})",
    "ms/token": "{ms_per_token:4}",
    "first token, ms": "{first_token_ms:4}",
    "GB/s read": "{read_gbs:4} ({bandwidth_share:.0%})",
    "GFLOP/s": "{gflops:4} ({peak_share:.0%})",
    "outside the model": "{outside_share:.1%}",
    "peak MB": "{peak_megabytes:.0f}",
}
NUMBERS = tuple(COLUMNS)[6:]  # columns aligned to the right
# Records of one test have these fields in common. llama-bench's own records have neither a dtype nor a batch size.
TEST_FIELDS = (
    "model_filename",
    "model_type",
    "dtype",
    "type_k",
    "n_threads",
    "batch_size",
    "n_prompt",
    "n_gen",
)
TEST_FIELDS += ("n_depth",)
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


def record_of(plan: "Plan", test: "Test", limits: roofline.MachineLimits) -> Record:
    """Return the record of a test, with llama-bench's keys and the keys of this module's docstring."""
    config = plan.config
    case = test.case
    dtype = test.dtype
    counts = (0, case.new_tokens, case.prompt_length) if case.new_tokens else (case.prompt_length, 0, 0)
    n_prompt, n_gen, n_depth = counts
    (commit, number) = build()
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


def to_markdown(records: Sequence[Record]) -> str:
    """Return the table, the meaning of its columns and the measured limits."""
    shown = [
        record | {"peak_megabytes": record["peak_memory"] and record["peak_memory"] / 1e6}
        for record in records
    ]
    return f"{records_table(shown, COLUMNS, NUMBERS)}\n\n{_notes(records)}"


def to_csv(records: Sequence[Record]) -> str:
    """Return a header and a line for each record, all quoted, as llama-bench does; lists are left out."""
    fields = dict.fromkeys(
        name for record in records for name in record if not isinstance(record[name], list)
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: int(v) if isinstance(v, bool) else v for name, v in record.items()} for record in records
    )
    return text.getvalue().rstrip("\n")


FORMATS = {
    "text": lambda records: aligned(to_markdown(records)),
    "md": to_markdown,
    "csv": to_csv,
    "json": lambda records: json.dumps(list(records), indent=2, ensure_ascii=False),
    "jsonl": lambda records: "\n".join(json.dumps(record, ensure_ascii=False) for record in records),
}


def records_table(
    records: Iterable[Record], columns: Mapping[str, str], numbers: Collection[str] = ()
) -> str:
    return table(columns, (cells_of(record, columns.values()) for record in records), numbers)


def table(header: Iterable[str], rows: Iterable[Iterable[str]], numbers: Collection[str] = ()) -> str:
    """Return a markdown table; columns with titles in `numbers` are aligned to the right."""
    rule = ["---:" if title in numbers else "---" for title in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def aligned(markdown: str) -> str:
    """Return the same text with the columns of its tables aligned by spaces, for a terminal."""
    lines = []
    for is_table, group in groupby(markdown.split("\n"), lambda line: line.startswith("| ")):
        if not is_table:
            lines += group
            continue
        header, rule, *rows = [line[2:-2].split(" | ") for line in group]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        forms = [
            f"{'>' if side.endswith(':') else '<'}{width}" for side, width in zip(rule, widths, strict=True)
        ]
        lines += ["  ".join(map(format, cells, forms)).rstrip() for cells in (header, *rows)]
    return "\n".join(lines)


def significant(number: float, digits: int = 4) -> str:
    """Format a number with so many significant digits and no exponent: 0.01234, 12.34, 123456."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    return f"{number:.{max(digits - 1 - math.floor(math.log10(abs(number))), 0)}f}"


def runs_text(count: int, spread: str = "") -> str:
    return "single runs" if count == 1 else f"medians of {count} runs{spread}"


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def parameters_text(count: float) -> str:
    return f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def read_records(path: Path) -> list[Record]:
    """Read a JSON or JSONL file of bench, or of llama-bench. Raise RequestError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        records = found if isinstance(found, list) else [found]
        if records and all(record["samples_ts"] and record["model_filename"] for record in records):
            return records
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise RequestError(
        f"{path} holds no records of bench: write them with --format json or jsonl, without --preset."
    )


def compare(old: list[Record], new: list[Record]) -> list[Record]:
    """Return a record for each test: tokens a second and their spread on both sides, null on a side without it."""
    before, after = _by_test(old), _by_test(new)
    found = []
    for key in dict.fromkeys((*before, *after)):
        sides = _side("old", before.get(key, [])) | _side("new", after.get(key, []))
        ratio = sides["new_ts"] / sides["old_ts"] if sides["new_ts"] and sides["old_ts"] else None
        found.append(dict(zip(TEST_FIELDS, key, strict=True)) | sides | {"ratio": ratio})
    return found


def comparison_table(compared: list[Record]) -> str:
    """Return the comparison as markdown: medians, the change, and the slowest and fastest run of each side."""
    header = ["test", "old, tokens/s", "new, tokens/s", "change"]
    forms = [f"{{{side}_ts:4}} ({{{side}_low_ts:4}} to {{{side}_high_ts:4}})" for side in ("old", "new")]
    changes = ["" if record["ratio"] is None else f"{record['ratio'] - 1:+.1%}" for record in compared]
    cells = [cells_of(record, forms) for record in compared]
    rows = [
        [_test_name(record), *sides, change]
        for record, sides, change in zip(compared, cells, changes, strict=True)
    ]
    note = (
        "Medians, with the slowest and the fastest run in brackets. A change within both ranges may be noise."
    )
    return f"{table(header, rows, header[1:])}\n\n- {note}"


def _by_test(records: list[Record]) -> dict[tuple, list[float]]:
    found: dict[tuple, list[float]] = {}
    for record in records:
        found.setdefault(tuple(record.get(name) for name in TEST_FIELDS), []).extend(record["samples_ts"])
    return found


def _side(name: str, samples: list[float]) -> Record:
    figures = (
        (statistics.median(samples), min(samples), max(samples), len(samples)) if samples else (None,) * 4
    )
    return dict(
        zip((f"{name}_ts", f"{name}_low_ts", f"{name}_high_ts", f"{name}_samples"), figures, strict=True)
    )


def _test_name(record: Record) -> str:
    kind = f"tg{record['n_gen']}" if record["n_gen"] else f"pp{record['n_prompt']}"
    depth = f" @ d{record['n_depth']}" if record["n_depth"] else ""
    parts = [
        record["model_filename"],
        record["dtype"] or record["model_type"],
        f"KV cache {record['type_k']}",
    ]
    batch = [] if record["batch_size"] is None else [f"batch {record['batch_size']}"]
    return ", ".join([*parts, f"threads {record['n_threads']}", *batch, f"{kind}{depth}"])


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return significant(value) if format_spec == "4" else super().format_field(value, format_spec)


def cells_of(record: Record, forms: Iterable[str], absent: str = "") -> list[str]:
    """Return the record's fields in these formats; `absent` stands for null."""
    cells = []
    for form in forms:
        try:
            cells.append(_Cells().vformat(form, (), record))
        except TypeError:  # the value is None
            cells.append(absent)
    return cells


def _notes(records: Sequence[Record]) -> str:
    first = records[0]
    gpu = records[0].get("gpu_info")
    bandwidths, peaks = {}, {}
    for record in records:
        place = "on the GPU" if gpu else f"with {threads_text(record['n_threads'])}"
        in_blocks = f"{record['block_peak_gflops']:.0f}"
        in_head = f"{record['head_peak_gflops']:.0f}"
        rates = in_blocks if in_blocks == in_head else f"{in_blocks} in the blocks and {in_head} in the head"
        bandwidths[place] = f"{record['bandwidth_gbs']:.1f} GB/s {place}"
        peaks[f"in {record['dtype']} {place}"] = f"{rates} in {record['dtype']} {place}"
    runs = runs_text(len(first["samples_ns"]), ", with the slowest and the fastest in brackets")
    clock = (
        " by the GPU's clock, sampling of queued steps included"
        if gpu
        else ", without tokenization and sampling"
    )
    memory = "of the GPU, all buffers" if gpu else "of the process, with what earlier rows touched"
    return f"""\
- {gpu or first["cpu_info"]}, build {first["build_commit"]}; {runs}.
- tokens/s and ms/token: of the forward passes{clock}. pp reads a prompt; tg generates after so many cached tokens.
- first token: from the call to the first token of the last prompt; pp only.
- GB/s read: weights, for tg the KV cache too; share of the measured {", ".join(bandwidths.values())}.
- GFLOP/s: share of the tiles' measured peak, {", ".join(peaks.values())}.
- outside the model: share of the time outside forward passes. peak MB: {memory}."""
