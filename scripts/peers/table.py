"""From the times of a run to ratios, and one markdown table."""

import statistics
from dataclasses import dataclass, field

from tinygpt.bench.report import table

from .cases import Case, Floor

NONE = "-"


@dataclass
class Row:
    """One case in one dtype: the milliseconds of every repeat, by engine, "tinygpt" among them."""

    case: Case
    dtype: str
    ms: dict[str, list[float]]
    floor: Floor | None = None
    absent: list[str] = field(default_factory=list)  # engines that have this dtype and could not be had, or failed

    @property
    def ours(self) -> float | None:
        return min(self.ms["tinygpt"]) if self.ms.get("tinygpt") else None

    @property
    def best_peer(self) -> str | None:
        """The peer with the shortest time of all."""
        peers = {name: min(times) for name, times in self.ms.items() if name != "tinygpt" and times}
        return min(peers, key=peers.__getitem__) if peers else None

    @property
    def ratio(self) -> float | None:
        """The best peer's best time over our best time: above 1, we are faster."""
        if self.ours is None or self.best_peer is None:
            return None
        return min(self.ms[self.best_peer]) / self.ours

    @property
    def share(self) -> float | None:
        """How much of the limit of the machine we reach: 1 is all of it."""
        return None if self.ours is None or self.floor is None else self.floor.ms / self.ours

    def as_json(self) -> dict:
        return {
            "case": self.case.name,
            "batch": self.case.batch,
            "is_prefill": self.case.is_prefill,
            "dtype": self.dtype,
            "ms": self.ms,
            "absent": self.absent,
            "best_peer": self.best_peer,
            "ratio": self.ratio,
            "floor_ms": self.floor and self.floor.ms,
            "limit": self.floor and self.floor.limit,
            "share": self.share,
        }


def markdown(rows: list[Row], engines: list[str]) -> str:
    """Best milliseconds, the median in brackets; the best peer's in bold."""
    head = ["case", "dtype", *engines, "best peer / ours", "of the limit"]
    lines = []
    for row in rows:
        times = [_cell(row, engine) for engine in engines]
        ratio = NONE if row.ratio is None else f"**{row.ratio:.2f}**"
        share = NONE if row.share is None else f"{row.share:.0%} ({row.floor.limit})"
        lines.append([row.case.name, row.dtype, *times, ratio, share])
    return table(head, lines)


def _cell(row: Row, engine: str) -> str:
    times = row.ms.get(engine)
    if not times:
        return "absent" if engine in row.absent else NONE
    text = f"{min(times):.2f} ({statistics.median(times):.2f})"
    return f"**{text}**" if engine == row.best_peer else text


@dataclass(frozen=True)
class Agreement:
    """How near an engine's logits for one prompt are to the reference's."""

    top_1: bool
    max_difference: float
    std: float  # of the reference's logits: what the difference is to be held against

    @classmethod
    def of(cls, logits: list[float], reference: list[float]) -> "Agreement":
        same = max(range(len(logits)), key=logits.__getitem__) == max(range(len(logits)), key=reference.__getitem__)
        largest = max(abs(a - b) for a, b in zip(logits, reference, strict=True))
        return cls(same, largest, statistics.pstdev(reference))

    def __str__(self) -> str:
        top = "the same" if self.top_1 else "another"
        return f"{top} top-1, largest difference {self.max_difference:.2g} (logits' std {self.std:.2g})"
