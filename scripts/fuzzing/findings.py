"""Findings on disk: the damaged file beside `finding.json`, which says what it is and what it does."""

import json
import re
from dataclasses import asdict
from pathlib import Path

from .cases import Case, Input
from .formats import FORMATS
from .minimise import fewer_bytes, fewer_mutations
from .supervisor import Judge, Report
from .worker import Limits, Outcome


def keep(report: Report, folder: Path) -> list[Path]:
    """Shrink the inputs of a report's findings, and write each into a folder of its own."""
    if not report.findings:
        return []
    judge, kept = Judge(Limits()), []
    for (_, what), inputs in report.findings.items():
        case, outcome = inputs[0]
        kept.append(_write(folder, case, _shrunk(judge, case, what), outcome))
    judge.close()
    return kept


def read(folder: Path) -> Input:
    """The input in a folder that `keep` has written."""
    said = json.loads((folder / "finding.json").read_text(encoding="utf-8"))
    return Input(said["format"], said["file"], (folder / said["file"]).read_bytes())


def _shrunk(judge: Judge, case: Case, what: str) -> Input:
    undamaged = FORMATS[case.format].files()[case.file]
    case = fewer_mutations(case, lambda shorter: judge.outcome(shorter).what == what)
    given = case.input(undamaged)
    if what.startswith(("takes", "waits")):  # each try would take as long
        return given
    return fewer_bytes(given, undamaged, lambda smaller: judge.outcome(smaller).what == what)


def _write(folder: Path, case: Case, given: Input, outcome: Outcome) -> Path:
    slug = re.sub(r"\W+", "-", f"{case.format} {outcome.what}").strip("-").lower()[:80]
    place = folder / slug
    place.mkdir(parents=True, exist_ok=True)
    (place / given.file).parent.mkdir(parents=True, exist_ok=True)
    (place / given.file).write_bytes(given.data)
    said = {"format": given.format, "file": given.file, "case": str(case), **asdict(outcome)}
    (place / "finding.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return place
