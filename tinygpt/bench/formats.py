"""Records as text, in llama-bench's formats: tables to read, and three for programs. Numbers in words, for all output.

The markdown tables of all commands and scripts are made here.
"""

import csv
import io
import json
import math
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tinygpt.hardware.threads import logical_cores

Record = dict[str, Any]

# A column of the table -> how a record fills it: `:4` is 4 significant digits. A share follows what it is of.
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
PP, TG = "pp", "tg"
# What each kind of test is, where it occurs.
KINDS = {
    PP: " pp reads a prompt and counts all its tokens.",
    TG: " tg generates after so many cached ones: ms/token is from one token of a sequence to its next.",
}
NOTES = (
    "{processor}, build {build_commit}; {runs}.",
    "tokens/s and ms/token cover the forward passes, without tokenisation and sampling{of_many}.{kinds}",
    "first token: from the call to the first token of the last prompt; pp only.",
    "GB/s read: of weights{and_of_cache}; the share is of what the machine reads, {bandwidths}. A model "
    "that fits into the caches can be faster than that, and the limit is itself a measurement, of a plain loop.",
    "GFLOP/s: the share is of what the kernels' tiles do with all data in the {nearest}, {peaks}. The limit is itself "
    "a measurement, of a plain loop.",
    "outside the model: the share of the whole time spent outside forward passes, on sampling, scheduling and "
    "bookkeeping. peak MB: {memory}.",
)


def to_markdown(records: Sequence[Record]) -> str:
    """The table, and below it what its columns mean and the limits that were measured."""
    shown = [record | {"peak_megabytes": record["peak_memory"] and record["peak_memory"] / 1e6} for record in records]
    return f"{records_table(shown, COLUMNS, NUMBERS)}\n\n{_notes(records)}"


def to_csv(records: Sequence[Record]) -> str:
    """A header and a line for each record, everything quoted; as in llama-bench's, without the single samples."""
    fields = dict.fromkeys(name for record in records for name in record if not isinstance(record[name], list))
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: int(v) if isinstance(v, bool) else v for name, v in record.items()} for record in records)
    return text.getvalue().rstrip("\n")


def to_json(records: Sequence[Record]) -> str:
    """An array of objects."""
    return json.dumps(list(records), indent=2, ensure_ascii=False)


def to_jsonl(records: Sequence[Record]) -> str:
    """An object in each line."""
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)


def to_text(records: Sequence[Record]) -> str:
    """What `to_markdown` has, for a terminal."""
    return aligned(to_markdown(records))


FORMATS: dict[str, Callable[[Sequence[Record]], str]] = {
    "text": to_text,
    "md": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "jsonl": to_jsonl,
}


def records_table(records: Iterable[Record], columns: Mapping[str, str], numbers: Collection[str] = ()) -> str:
    """A markdown table; `columns` maps each column's title to the format that a record fills."""
    return table(columns, ([_cell(form, record) for form in columns.values()] for record in records), numbers)


def table(header: Iterable[str], rows: Iterable[Iterable[str]], numbers: Collection[str] = ()) -> str:
    """A markdown table; the columns whose titles are in `numbers` are aligned to the right."""
    rule = ["---:" if title in numbers else "---" for title in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def aligned(markdown: str) -> str:
    """The same for a terminal: the columns of its tables aligned by spaces, without bars."""
    lines = []
    for is_table, group in groupby(markdown.split("\n"), lambda line: line.startswith("| ")):
        found = list(group)
        lines += _aligned_rows([line[2:-2].split(" | ") for line in found]) if is_table else found
    return "\n".join(lines)


def _aligned_rows(rows: list[list[str]]) -> list[str]:
    """Of a header, the rule below it, which says what stands on the right, and rows."""
    header, rule, *others = rows
    columns = zip(*(header, *others), strict=True)
    widths = [max(map(len, column)) for column in columns]
    places = [f">{width}" if side.endswith(":") else f"<{width}" for side, width in zip(rule, widths, strict=True)]
    lines = ("  ".join(map(format, cells, places)) for cells in (header, *others))
    return [line.rstrip() for line in lines]


def significant(number: float, digits: int = 4) -> str:
    """A number with so many significant digits, and never an exponent: 0.01234, 12.34, 123456."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(number)))
    return f"{number:.{max(decimals, 0)}f}"


def runs_text(count: int, spread: str = "") -> str:
    """What a figure stands for; `spread` follows where several runs have one."""
    return "single runs" if count == 1 else f"medians of {count} runs{spread}"


def points_text(count: int) -> str:
    """What a point of a picture stands for."""
    return f"Points are {runs_text(count, ', error bars span all of them')}."


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def where_text(threads: int, device: str) -> str:
    """What computes."""
    return "the GPU" if device == "cuda" else threads_text(threads)


def parameters_text(count: float) -> str:
    """124M, or 1.56B."""
    return f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def crowd_note(threads: int) -> str:
    """What a reader of the figures must know where threads outnumber the cores; empty otherwise."""
    cores = logical_cores()
    if threads <= cores:
        return ""
    return f"{threads} threads share {cores} logical core{'s' * (cores > 1)}, and wait for one another"


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return significant(value) if format_spec == "4" else super().format_field(value, format_spec)


def _cell(form: str, record: Record) -> str:
    try:
        return _Cells().vformat(form, (), record)
    except TypeError:  # None has no digits: there is no such value
        return ""


# What notes say of a CPU, and of a GPU.
ON_CPU = {
    "of_many": "",
    "nearest": "caches",
    "memory": "of the process, including memory that earlier rows touched",
}
ON_GPU = {
    "of_many": " by the GPU's own clock; decode steps that are queued together choose their tokens in that time",
    "nearest": "registers",
    "memory": "of the GPU's memory, all buffers included",
}


def _notes(records: Sequence[Record]) -> str:
    bandwidths, peaks = {}, {}
    gpu = records[0].get("gpu_info")
    for record in records:
        where = "on the GPU" if gpu else f"with {threads_text(record['n_threads'])}"
        bandwidths[where] = record["bandwidth_gbs"]
        peaks[f"in {record['dtype']} {where}"] = _peak_text(record["block_peak_gflops"], record["head_peak_gflops"])
    kinds = [kind for kind in KINDS if any(record["test"].startswith(kind) for record in records)]
    values = {
        **records[0],
        **(ON_GPU if gpu else ON_CPU),
        "processor": gpu or records[0]["cpu_info"],
        "kinds": "".join(KINDS[kind] for kind in kinds),
        "and_of_cache": " and, for tg, of the KV cache" if TG in kinds else "",
        "runs": runs_text(len(records[0]["samples_ns"]), ", with the slowest and the fastest in brackets"),
        "bandwidths": ", ".join(f"{rate:.1f} GB/s {where}" for where, rate in bandwidths.items()),
        "peaks": ", ".join(f"{rates} {where}" for where, rates in peaks.items()),
    }
    crowds = [] if gpu else dict.fromkeys(record["n_threads"] for record in records)
    crowded = filter(None, map(crowd_note, crowds))
    shown = [note for note in NOTES if PP in kinds or not note.startswith("first token")]
    notes = [*(note.format(**values) for note in shown), *(f"{note}." for note in crowded)]
    return "\n".join(f"- {note}" for note in notes)


def _peak_text(in_blocks: float, in_head: float) -> str:
    """Both rates where they differ: int4 has an int8 head."""
    blocks, head = f"{in_blocks:.0f}", f"{in_head:.0f}"
    return blocks if blocks == head else f"{blocks} in the blocks and {head} in the head"
