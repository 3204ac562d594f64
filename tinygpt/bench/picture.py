"""What a picture shows, not how it is drawn: panels of lines, whose points have a spread."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDE = 8  # a range of values by this factor, or more, is read better on a logarithmic axis


@dataclass(frozen=True)
class Point:
    """A value with the ends of its error bar; `name` is written beside it."""

    x: float
    y: float
    low: float
    high: float
    name: str = ""

    @classmethod
    def of(cls, x: float, samples: Sequence[float], name: str = "") -> "Point":
        """Median, and as error bar the range of all samples."""
        return cls(x, statistics.median(samples), min(samples), max(samples), name)

    @classmethod
    def exact(cls, x: float, y: float, name: str = "") -> "Point":
        """A value without a spread, as most published ones are."""
        return cls(x, y, y, y, name)


@dataclass(frozen=True)
class Line:
    """Points from left to right. Lines of one `group` share a colour; "" is a group of its own.

    `is_published` draws another's figures in grey, behind ours.
    """

    label: str
    points: tuple[Point, ...]
    group: str = ""
    is_published: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes, labelled with units.

    `names` makes x the index of a name, not a number, and the points bars. `has_free_x` says that x was measured too,
    so that its ticks are round numbers; otherwise they are the values themselves.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    names: tuple[str, ...] = ()
    has_free_x: bool = False

    @property
    def xs(self) -> list[float]:
        return sorted({point.x for line in self.lines for point in line.points})

    @property
    def lows(self) -> list[float]:
        return [point.low for line in self.lines for point in line.points]


@dataclass(frozen=True)
class Picture:
    """Panels side by side. `title` says what and on which model, `note` what a reader has to know.

    `has_shared_y` is for panels that are to be compared with one another.
    """

    title: str
    panels: tuple[Panel, ...]
    note: str = ""
    has_shared_y: bool = False

    def has_log_x(self, panel: Panel) -> bool:
        """Panels whose axes have one label have axes of one kind: logarithmic, where that serves any of them."""
        return not panel.names and _is_log([other.xs for other in self.panels if other.x_label == panel.x_label])

    def has_log_y(self, panel: Panel) -> bool:
        return not panel.names and _is_log([other.lows for other in self.panels if other.y_label == panel.y_label])


def model_name(model: str) -> str:
    """What a title calls a model that was given as a folder, a Hub id or otherwise."""
    return Path(model).name or model


def _is_log(ranges: Sequence[Sequence[float]]) -> bool:
    return all(min(values) > 0 for values in ranges) and any(map(_is_wide, ranges))


def _is_wide(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) >= WIDE * min(values)
