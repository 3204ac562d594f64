"""Two files of records side by side: what has changed, and whether that is more than the noise of both."""

import json
import statistics
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from tinygpt.errors import RequestError

# What makes two records those of one test. llama-bench's own records have neither a dtype nor a batch size.
SAME = ("model_filename", "model_type", "dtype", "n_threads", "batch_size", "n_prompt", "n_gen", "n_depth")
LEVEL = 0.05  # how probable mere chance may be, at most, for what is called a change

Key = tuple[Any, ...]
Samples = list[float]  # tokens a second of each run


@dataclass(frozen=True)
class Change:
    """One test in both files: tokens a second, of each run.

    A change counts where every run of one file is faster than every run of the other. That is the extreme outcome of
    a rank test (Mann and Whitney's): if nothing had changed, n and m runs would fall apart like that by chance once in
    C(n + m, n) / 2 times: 0.8 % for 5 and 5, 10 % for 3 and 3. Where that is more than LEVEL, there are too few runs
    to say anything. It is about single runs beside each other: a machine that was slower all through one of the files
    looks like a change, so measure again, in turns, before believing one.
    """

    key: Key
    old: Samples
    new: Samples

    @property
    def old_median(self) -> float:
        return statistics.median(self.old)

    @property
    def new_median(self) -> float:
        return statistics.median(self.new)

    @property
    def ratio(self) -> float:
        """New over old speed: above 1, it is faster now."""
        return self.new_median / self.old_median

    @property
    def chance(self) -> float:
        """How probable it is for so many runs to fall apart where nothing has changed."""
        return 2 / comb(len(self.old) + len(self.new), len(self.old))

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "within noise" or "too few runs"."""
        if self.chance > LEVEL:
            return "too few runs"
        if min(self.new) > max(self.old):
            return "faster"
        return "slower" if max(self.new) < min(self.old) else "within noise"


@dataclass(frozen=True)
class Comparison:
    """Tests that are in both files, and those that are in one alone. `machines` are those of both files."""

    changes: tuple[Change, ...]
    only_old: tuple[Key, ...]
    only_new: tuple[Key, ...]
    machines: tuple[str, ...]

    @property
    def records(self) -> list[dict[str, Any]]:
        """An object for each test, for programs; what one file lacks is null there."""
        return [
            *(_record(c.key, c.old_median, c.new_median, c.ratio, c.verdict) for c in self.changes),
            *(_record(key, None, None, None, "only in the old file") for key in self.only_old),
            *(_record(key, None, None, None, "only in the new file") for key in self.only_new),
        ]


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Comparison:
    """Match the records of two files by SAME. Several records of one test in one file count as more runs of it."""
    before, after = _samples(old), _samples(new)
    return Comparison(
        tuple(Change(key, before[key], after[key]) for key in before if key in after),
        tuple(key for key in before if key not in after),
        tuple(key for key in after if key not in before),
        tuple(dict.fromkeys(str(record.get("cpu_info")) for record in [*old, *new])),
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON or JSONL file, ours or llama-bench's. RequestError if it holds anything else."""
    try:
        text = path.read_text(encoding="utf-8")
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(s) for s in text.splitlines() if s]
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is no JSON or JSONL: give what bench has written with --format json.") from None
    if not records or not all(map(_is_record, records)):
        raise RequestError(f"{path} holds no records of a bench: give what bench has written with --format json.")
    return records


def to_markdown(comparison: Comparison) -> str:
    """A table of the tests in both files, and lists of the others."""
    header = ["test", "old, tokens/s", "new, tokens/s", "change", "noise, old and new", ""]
    rows = [header, ["---", "---:", "---:", "---:", "---:", "---"], *map(_row, comparison.changes)]
    lines = ["| " + " | ".join(row) + " |" for row in rows] if comparison.changes else ["No test is in both files."]
    lines += [
        "",
        "Medians; noise: how far the slowest and the fastest run lie from it. A change counts where all runs of one "
        "file are faster than all of the other.",
    ]
    for keys, which in ((comparison.only_old, "old"), (comparison.only_new, "new")):
        lines += [f"- only in the {which} file: {_named(key)}" for key in keys]
    if len(comparison.machines) > 1:
        lines.append(f"- the files are not from one machine: {', '.join(comparison.machines)}")
    return "\n".join(lines)


def _row(change: Change) -> list[str]:
    return [
        _named(change.key),
        f"{change.old_median:.1f}",
        f"{change.new_median:.1f}",
        f"{change.ratio - 1:+.1%}",
        f"{_noise(change.old)}, {_noise(change.new)}",
        change.verdict,
    ]


def _noise(samples: Samples) -> str:
    median = statistics.median(samples)
    return f"{min(samples) / median - 1:+.1%} {max(samples) / median - 1:+.1%}"


def _named(key: Key) -> str:
    fields = dict(zip(SAME, key, strict=True))
    kind = f"tg{fields['n_gen']}" if fields["n_gen"] else f"pp{fields['n_prompt']}"
    depth = f" @ d{fields['n_depth']}" if fields["n_depth"] else ""
    parts = [fields["model_filename"], fields["dtype"] or fields["model_type"], f"threads {fields['n_threads']}"]
    batch = [] if fields["batch_size"] is None else [f"batch {fields['batch_size']}"]
    return ", ".join(map(str, [*parts, *batch, f"{kind}{depth}"]))


def _record(key: Key, old: float | None, new: float | None, ratio: float | None, verdict: str) -> dict[str, Any]:
    return dict(zip(SAME, key, strict=True)) | {"old_ts": old, "new_ts": new, "ratio": ratio, "verdict": verdict}


def _samples(records: list[dict[str, Any]]) -> dict[Key, Samples]:
    found: dict[Key, Samples] = {}
    for record in records:
        found.setdefault(tuple(record.get(name) for name in SAME), []).extend(record["samples_ts"])
    return found


def _is_record(record: Any) -> bool:
    try:
        is_measured = all(sample > 0 for sample in record["samples_ts"]) and record["samples_ts"]
        return bool(is_measured) and "n_prompt" in record and "n_gen" in record
    except (TypeError, KeyError):
        return False
