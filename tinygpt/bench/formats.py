"""Records as text, in the formats that llama-bench has: a table to read, and three for programs."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from tinygpt.bench.cores import crowd_note
from tinygpt.bench.words import runs_text, threads_text

Record = dict[str, Any]

# A column of the table -> how a record fills it. A share stands beside what it is a share of.
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
NAMES_OF_ROW = ("model", "dtype", "threads", "batch", "test")  # these are aligned to the left
NOTES = (
    "{cpu_info}, build {build_commit}; {runs}.",
    "tokens/s and ms/token are of the forward passes, without tokenisation and sampling. pp reads a prompt: of all its "
    "tokens. tg generates, with so many in the cache: ms/token is from one token of a sequence to its next.",
    "first token: from the call to the first token of the last prompt; of pp alone.",
    "GB/s read: of weights, and for tg of the KV cache; the share is of what the machine reads, {bandwidths}. A model "
    "that fits into the caches can be faster than that, and the limit is itself a measurement, of a plain loop.",
    "GFLOP/s: the share is of what the kernels' tiles do with all data in the caches, {peaks}. The limit is itself a "
    "measurement, of a plain loop.",
    "outside the model: the share of the whole time that is not in forward passes: choosing tokens, scheduling and "
    "bookkeeping. peak MB: of the process, with what earlier rows made it touch.",
)


def to_markdown(records: Sequence[Record]) -> str:
    """The table, and below it what its columns mean, and the limits that were measured."""
    rows = [[_cell(form, record) for form in COLUMNS.values()] for record in records]
    rule = ["---" if name in NAMES_OF_ROW else "---:" for name in COLUMNS]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [list(COLUMNS), rule, *rows])
    return f"{table}\n\n{_notes(records)}"


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


def _cell(form: str, record: Record) -> str:
    peak = record["peak_memory"]
    values = {**record, "peak_megabytes": None if peak is None else peak / 1e6}
    try:
        return form.format(**values)
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
        "runs": runs_text(len(records[0]["samples_ns"]), ", and in brackets the slowest and the fastest"),
        "bandwidths": ", ".join(f"{rate:.1f} GB/s {where}" for where, rate in bandwidths.items()),
        "peaks": ", ".join(f"{rates} {where}" for where, rates in peaks.items()),
    }
    crowded = filter(None, (crowd_note(threads) for threads in dict.fromkeys(r["n_threads"] for r in records)))
    notes = [*(note.format(**values) for note in NOTES), *(f"{note}, and wait for one another." for note in crowded)]
    return "\n".join(f"- {note}" for note in notes)


def _peak_text(in_blocks: float, in_head: float) -> str:
    """Both where their tiles differ, as those of int4 do from the int8 head's."""
    blocks, head = f"{in_blocks:.0f}", f"{in_head:.0f}"
    return blocks if blocks == head else f"{blocks} in the blocks and {head} in the head"
