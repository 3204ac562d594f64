"""Records as text, in llama-bench's formats: a table to read, and three for programs. Numbers in words, for all output.

The markdown tables of all commands and scripts are made here.
"""

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tinygpt.hardware.threads import logical_cores

Record = dict[str, Any]

# A column of the table -> how a record fills it. A share follows what it is a share of.
COLUMNS = {
    "model": "{model_filename}",
    "dtype": "{dtype}",
    "threads": "{n_threads}",
    "batch": "{batch_size}",
    "test": "{test}",
    "tokens/s": "{median_ts:.1f} ({low_ts:.1f} to {high_ts:.1f})",
    "ms/token": "{ms_per_token:.3f}",
    "first token, ms": "{first_token_ms:.1f}",
    "GB/s read": "{read_gbs:.1f} ({bandwidth_share:.0%})",
    "GFLOP/s": "{gflops:.1f} ({peak_share:.0%})",
    "outside the model": "{outside_share:.1%}",
    "peak MB": "{peak_megabytes:.0f}",
}
NUMBERS = tuple(COLUMNS)[5:]  # columns aligned to the right
NOTES = (
    "{cpu_info}, build {build_commit}; {runs}.",
    "tokens/s and ms/token cover the forward passes, without tokenisation and sampling. pp reads a prompt and counts "
    "all its tokens. tg generates after so many cached ones: ms/token is from one token of a sequence to its next.",
    "first token: from the call to the first token of the last prompt; pp only.",
    "GB/s read: of weights and, for tg, of the KV cache; the share is of what the machine reads, {bandwidths}. A model "
    "that fits into the caches can be faster than that, and the limit is itself a measurement, of a plain loop.",
    "GFLOP/s: the share is of what the kernels' tiles do with all data in the caches, {peaks}. The limit is itself a "
    "measurement, of a plain loop.",
    "outside the model: the share of the whole time spent outside forward passes, on sampling, scheduling and "
    "bookkeeping. peak MB: of the process, including memory that earlier rows touched.",
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


FORMATS: dict[str, Callable[[Sequence[Record]], str]] = {
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


def runs_text(count: int, spread: str = "") -> str:
    """What a figure stands for; `spread` follows where several runs have one."""
    return "single runs" if count == 1 else f"medians of {count} runs{spread}"


def points_text(count: int) -> str:
    """What a point of a picture stands for."""
    return f"Points are {runs_text(count, ', error bars span all of them')}."


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def parameters_text(count: float) -> str:
    """124M, or 1.56B."""
    return f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def crowd_note(threads: int) -> str:
    """What a reader of the figures must know where threads outnumber the cores; empty otherwise."""
    cores = logical_cores()
    if threads <= cores:
        return ""
    return f"{threads} threads share {cores} logical core{'s' * (cores > 1)}, and wait for one another"


def _cell(form: str, record: Record) -> str:
    try:
        return form.format(**record)
    except TypeError:  # None has no digits: there is no such value
        return ""


def _notes(records: Sequence[Record]) -> str:
    bandwidths, peaks = {}, {}
    for record in records:
        where = f"with {threads_text(record['n_threads'])}"
        bandwidths[where] = record["bandwidth_gbs"]
        peaks[f"in {record['dtype']} {where}"] = _peak_text(record["block_peak_gflops"], record["head_peak_gflops"])
    values = {
        **records[0],
        "runs": runs_text(len(records[0]["samples_ns"]), ", with the slowest and the fastest in brackets"),
        "bandwidths": ", ".join(f"{rate:.1f} GB/s {where}" for where, rate in bandwidths.items()),
        "peaks": ", ".join(f"{rates} {where}" for where, rates in peaks.items()),
    }
    crowded = filter(None, (crowd_note(threads) for threads in dict.fromkeys(r["n_threads"] for r in records)))
    notes = [*(note.format(**values) for note in NOTES), *(f"{note}." for note in crowded)]
    return "\n".join(f"- {note}" for note in notes)


def _peak_text(in_blocks: float, in_head: float) -> str:
    """Both rates where they differ: int4 has an int8 head."""
    blocks, head = f"{in_blocks:.0f}", f"{in_head:.0f}"
    return blocks if blocks == head else f"{blocks} in the blocks and {head} in the head"
