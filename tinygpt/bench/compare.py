"""Two files of records side by side: what has changed, and whether by more than the noise of both."""

import json
import statistics
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from tinygpt.bench.formats import Record, significant, table
from tinygpt.bench.work import CACHE_NAMES, CACHES
from tinygpt.errors import RequestError

# Two records with these in common are of one test. llama-bench's own have neither a dtype nor a batch size.
SAME = ("model_filename", "model_type", "dtype", "type_k", "n_threads", "batch_size", "n_prompt", "n_gen", "n_depth")
LLAMA_BENCHS_CACHE = "f16"  # where it is not told otherwise
LEVEL = 0.05  # a change is called one if mere chance is less probable than this
LIMITS = ("bandwidth_gbs", "block_peak_gflops", "head_peak_gflops")  # of the machine, measured with each record of ours
VERDICTS = {
    "faster, slower": "in files measured in turns, every median of one side is above every one of the other",
    "beyond both spreads": "of two files, every run of one is faster than every run of the other",
    "machine changed": "as before, but what the machine can do, measured with both, differs by as much",
    "not in turns": "the times of the tests do not alternate between the sides",
    "other machine": "cpu_info or gpu_info differs, so more than the code does",
    "too few": "mere chance would look like this in more than 5 % of cases",
}
GIVE = "give what bench has written, without --preset, with --format json or jsonl"
MEDIANS = (
    "- Medians; noise is how far the slowest and the fastest lie from them: of runs, or of the files' medians where a "
    "side has several files."
)
TWO_FILES = (
    "- Two files of different times also differ by what else the machine did, and no run in them shows how much. Only "
    "files measured in turns tell: four pairs or more, --compare OLD NEW OLD NEW OLD NEW OLD NEW."
)

Key = tuple[Any, ...]
Samples = list[float]  # tokens a second


@dataclass(frozen=True)
class Change:
    """One test on both sides: tokens a second, of each run; or, where a side has several records, their medians.

    Two sides are apart where every sample of one is faster than every one of the other. That is the extreme outcome
    of a rank test (Mann and Whitney's): if nothing had changed, n and m samples would fall apart like that by chance
    once in C(n + m, n) / 2 times: 0.8 % for 5 and 5, 2.9 % for 4 and 4, 10 % for 3 and 3. Where that is more than
    LEVEL, there are too few to tell.

    The runs of one record do not show how the machine was at another time, so they never make a test "faster" or
    "slower": only medians of records measured in turns do.
    """

    key: Key
    old: Samples
    new: Samples
    has_several: bool = False  # samples are medians of records
    is_in_turns: bool = False
    is_one_machine: bool = True  # all records have one processor
    machine_ratio: float = 1.0  # by which factor the machine's measured limits differ, at most; never below 1

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
        """How probable it is for so many samples to fall apart where nothing has changed."""
        return 2 / comb(len(self.old) + len(self.new), len(self.old))

    @property
    def verdict(self) -> str:
        """In words, which VERDICTS explains."""
        if not self.is_one_machine:
            return "other machine"
        if self.chance > LEVEL:
            return "too few files" if self.has_several else "too few runs"
        if min(self.new) <= max(self.old) and max(self.new) >= min(self.old):
            return "within noise"
        if not self.has_several:
            is_more = max(self.ratio, 1 / self.ratio) > self.machine_ratio
            return "beyond both spreads" if is_more else "machine changed"
        if not self.is_in_turns:
            return "not in turns"
        return "faster" if self.ratio > 1 else "slower"


@dataclass(frozen=True)
class Comparison:
    """Tests that are on both sides, and the samples of those that are on one alone. `machines` are those of all."""

    changes: tuple[Change, ...]
    only_old: dict[Key, Samples]
    only_new: dict[Key, Samples]
    machines: tuple[str, ...]

    @property
    def records(self) -> list[Record]:
        """An object for each test, for programs; what one side lacks is null there."""
        return [
            *(_record(c.key, c.old, c.new, c.verdict, c.machine_ratio) for c in self.changes),
            *(_record(key, samples, None, "only in the old file") for key, samples in self.only_old.items()),
            *(_record(key, None, samples, "only in the new file") for key, samples in self.only_new.items()),
        ]


def compare(old: list[Record], new: list[Record]) -> Comparison:
    """Match the records of two sides by SAME. Several records of one test on a side count by their medians."""
    before, after = _by_test(old), _by_test(new)
    return Comparison(
        tuple(_change(key, before[key], after[key]) for key in before if key in after),
        {key: _samples(records) for key, records in before.items() if key not in after},
        {key: _samples(records) for key, records in after.items() if key not in before},
        tuple(_machines([*old, *new])),
    )


def read_records(path: Path) -> list[Record]:
    """The records of a JSON or JSONL file, ours or llama-bench's. RequestError if it holds anything else."""
    try:
        records = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is no JSON or JSONL: {GIVE}.") from None
    if records and all(isinstance(record, dict) and "preset" in record for record in records):
        raise RequestError(f"{path} holds the records of a preset, which are times of whole requests: {GIVE}.")
    if not records or not all(map(_is_record, records)):
        raise RequestError(f"{path} holds no records of a bench: {GIVE}.")
    return records


def to_markdown(comparison: Comparison) -> str:
    """A table of the tests on both sides, lists of the others, and what the words of the table mean."""
    header = ["test", "old, tokens/s", "new, tokens/s", "change", "noise, old and new", ""]
    lines = ["No test is on both sides.", ""]
    if comparison.changes:
        lines = [table(header, map(_row, comparison.changes), header[1:5]), "", *_notes(comparison.changes)]
    for only, which in ((comparison.only_old, "old"), (comparison.only_new, "new")):
        lines += [f"- only in the {which} file: {_named(key)}" for key in only]
    if len(comparison.machines) > 1:
        lines.append(f"- the files are not from one machine: {', '.join(comparison.machines)}")
    return "\n".join(lines)


def _parse(text: str) -> list[Any]:
    """ValueError if it is neither JSON nor JSONL."""
    try:
        found = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return found if isinstance(found, list) else [found]


def _by_test(records: list[Record]) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record.get(name) for name in SAME), []).append(record)
    return found


def _change(key: Key, old: list[Record], new: list[Record]) -> Change:
    has_several = len(old) > 1 or len(new) > 1
    samples = _samples(old, has_several), _samples(new, has_several)
    is_one_machine = len(_machines([*old, *new])) == 1
    return Change(key, *samples, has_several, _is_in_turns(old, new), is_one_machine, _machine_ratio(old, new))


def _samples(records: list[Record], has_several: bool | None = None) -> Samples:
    """Of each run of a record, or the medians of several."""
    if len(records) > 1 or has_several:
        return [statistics.median(record["samples_ts"]) for record in records]
    return records[0]["samples_ts"]


def _is_in_turns(old: list[Record], new: list[Record]) -> bool:
    """Whether the 1st and the 2nd test in time are one of each side, and so the 3rd and the 4th, and all after them.

    ISO times have the order of their text. Times that are equal say nothing of an order.
    """
    sides = [(str(record.get("test_time", "")), side) for side, records in enumerate((old, new)) for record in records]
    times = sorted(sides)
    pairs = zip(times[::2], times[1::2], strict=False)  # where one is left over, the sides have not as many
    is_ordered = len({time for time, _ in times}) == len(times)
    return len(old) == len(new) and is_ordered and all(first[1] != second[1] for first, second in pairs)


def _machines(records: list[Record]) -> dict[str, None]:
    """Each once, in their order."""
    return dict.fromkeys(str(record.get("gpu_info") or record.get("cpu_info")) for record in records)


def _machine_ratio(old: list[Record], new: list[Record]) -> float:
    """llama-bench's records have no limits: 1."""
    ratios = [1.0]
    for name in LIMITS:
        before, after = ([record[name] for record in records if record.get(name)] for records in (old, new))
        if before and after:
            ratio = statistics.median(after) / statistics.median(before)
            ratios += [ratio, 1 / ratio]
    return max(ratios)


def _notes(changes: tuple[Change, ...]) -> list[str]:
    """What the words of the table mean that are in it."""
    words = {change.verdict for change in changes}
    meanings = [
        f"- {verdict}: {meaning}."
        for verdict, meaning in VERDICTS.items()
        if any(word.startswith(tuple(verdict.split(", "))) for word in words)
    ]
    return [MEDIANS, *([] if all(change.has_several for change in changes) else [TWO_FILES]), *meanings]


def _row(change: Change) -> list[str]:
    return [
        _named(change.key),
        significant(change.old_median),
        significant(change.new_median),
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
    parts = [fields["model_filename"], fields["dtype"] or fields["model_type"]]
    if fields["type_k"] not in (None, CACHE_NAMES.get(CACHES.get(fields["dtype"]), LLAMA_BENCHS_CACHE)):
        parts.append(f"KV cache {fields['type_k']}")
    parts.append(f"threads {fields['n_threads']}")
    batch = [] if fields["batch_size"] is None else [f"batch {fields['batch_size']}"]
    return ", ".join(map(str, [*parts, *batch, f"{kind}{depth}"]))


def _record(
    key: Key, old: Samples | None, new: Samples | None, verdict: str, machine_ratio: float | None = None
) -> Record:
    ratio = statistics.median(new) / statistics.median(old) if old and new else None
    sides = _side("old", old) | _side("new", new)
    found = {"ratio": ratio, "machine_ratio": machine_ratio, "verdict": verdict}
    return dict(zip(SAME, key, strict=True)) | sides | found


def _side(name: str, samples: Samples | None) -> Record:
    """Median, ends and number of the samples."""
    figures = (statistics.median(samples), min(samples), max(samples), len(samples)) if samples else (None,) * 4
    return dict(zip((f"{name}_ts", f"{name}_low_ts", f"{name}_high_ts", f"{name}_samples"), figures, strict=True))


def _is_record(record: Any) -> bool:
    try:
        is_measured = all(sample > 0 for sample in record["samples_ts"]) and record["samples_ts"]
        is_named = isinstance(record["model_filename"], str)
        has_sizes = all(isinstance(record[name], int) for name in ("n_threads", "n_prompt", "n_gen"))
        has_key = all(isinstance(record.get(name), (str, int, type(None))) for name in SAME)
        has_limits = all(record.get(name) is None or record[name] > 0 for name in LIMITS)
    except (TypeError, KeyError):
        return False
    return bool(is_measured) and is_named and has_sizes and has_key and has_limits
