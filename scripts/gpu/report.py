"""What was measured, in markdown: a line for every case, and whether the bars are met."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from tinygpt import __version__
from tinygpt.weights.random_checkpoint import SHAPES

from .cases import MODELS, PREFILL, PREFILL_TOKENS, Case
from .check import Agreement
from .plan import OURS

NONE = "-"
HEAD = ("model", "dtype", "case", "engine", "ms", "tokens/s", "of read bandwidth", "of product rate", "its time / ours")
# At batch 1 in bfloat16, how many times faster than each we have to be.
LEADS = {"eager": 10.0, "compiled": 2.0, "graph": 1.2}
MAX_LOGIT_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Row:
    """One case of one engine. ms: of a step, or of the prefill, of every repeat."""

    model: str
    dtype: str
    engine: str
    case: Case
    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def tokens_per_second(self) -> float:
        """New ones; of a prefill, none but the first comes out, and this is of the prompt."""
        return (PREFILL_TOKENS if self.case.is_prefill else self.case.batch) / (self.median / 1e3)


@dataclass
class Results:
    """What a run has found so far. limits: what the GPU can do, empty where it could not be measured."""

    rows: list[Row] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    agreements: list[Agreement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # what, and why
    left_out: dict[str, str] = field(default_factory=dict)

    def find(self, model: str, dtype: str, engine: str, case: Case) -> Row | None:
        wanted = model, dtype, engine, case
        return next((row for row in self.rows if (row.model, row.dtype, row.engine, row.case) == wanted), None)

    def share(self, row: Row) -> tuple[float | None, float | None]:
        """Of the measured read bandwidth, for a step, and of the measured rate of products, for a prefill."""
        seconds, config = row.median / 1e3, SHAPES[row.model]
        if not self.limits:
            return None, None
        if row.case.is_prefill:
            peak = self.limits["float32" if row.dtype == "float32" else "bfloat16"]
            return None, row.case.operations(config) / seconds / peak
        return row.case.bytes_read(config, row.dtype) / seconds / self.limits["bandwidth"], None

    def lead(self, row: Row) -> float | None:
        """This engine's time over ours."""
        ours = self.find(row.model, row.dtype, OURS, row.case)
        return None if ours is None else row.median / ours.median

    def as_json(self) -> dict[str, Any]:
        return {
            "limits": self.limits,
            "rows": [self._row_as_json(row) for row in self.rows],
            "agreements": [vars(agreement) for agreement in self.agreements],
            "bars": [vars(bar) for bar in bars(self)],
            "failed": self.failed,
            "left_out": self.left_out,
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        bandwidth, peak = self.share(row)
        return {
            **vars(row),
            "case": row.case.name,
            "median": row.median,
            "tokens_per_second": row.tokens_per_second,
            "of_bandwidth": bandwidth,
            "of_peak": peak,
            "over_ours": self.lead(row),
        }


def line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def opening(results: Results) -> str:
    """What the GPU can do, as it was measured."""
    if not results.limits:
        return "The GPU's limits could not be measured."
    limits = results.limits
    versions = f"torch {limits['torch']}, transformers {limits['transformers']}, tinygpt {__version__}"
    peaks = " and ".join(f"{limits[dtype] / 1e12:.3g} TFLOP/s in {dtype}" for dtype in ("bfloat16", "float32"))
    return f"{limits['gpu']}; {versions}. It reads {limits['bandwidth'] / 1e9:,.0f} GB/s and multiplies {peaks}."


def table_head() -> str:
    return f"{line(HEAD)}\n{line(['---'] * len(HEAD))}"


def table_line(row: Row, results: Results) -> str:
    bandwidth, peak = (NONE if share is None else f"{share:.0%}" for share in results.share(row))
    lead = results.lead(row)
    return line(
        [
            row.model,
            row.dtype,
            row.case.name,
            row.engine,
            f"{row.median:.3f} ({min(row.ms):.3f})",
            f"{row.tokens_per_second:,.0f}",
            bandwidth,
            peak,
            NONE if lead is None else f"{lead:.2f}",
        ]
    )


@dataclass(frozen=True)
class Bar:
    """One thing that is to be shown: `verdict` is "met", "not met" or "not measured"."""

    what: str
    bar: str
    measured: str
    verdict: str

    @classmethod
    def of(cls, what: str, bar: str, figure: float | None, form: str, is_met: bool) -> "Bar":
        if figure is None:
            return cls(what, bar, NONE, "not measured")
        return cls(what, bar, form.format(figure), "met" if is_met else "not met")


def bars(results: Results) -> list[Bar]:
    """The bars, which are for one H200, and where we are."""
    return [*_speed_bars(results), *_lead_bars(results), *_agreement_bars(results)]


def _speed_bars(results: Results) -> list[Bar]:
    def ours(model: str, case: Case) -> Row | None:
        return results.find(model, "bfloat16", OURS, case)

    def at_most(what: str, row: Row | None, limit: float, aim: float) -> Bar:
        figure = row and row.median
        return Bar.of(what, f"≤ {limit} ms, aim {aim}", figure, "{:.3f} ms", figure is not None and figure <= limit)

    found = [at_most("124M, batch 1", ours("124M", Case.decode(1)), 0.25, 0.12)]
    for model in MODELS[1:]:
        row = ours(model, Case.decode(1))
        share = row and results.share(row)[0]
        what, bar = f"{model}, batch 1", "≥ 50% of measured bandwidth, aim 75%"
        found.append(Bar.of(what, bar, share, "{:.0%}", share is not None and share >= 0.5))
    row = ours("124M", Case.decode(32))
    rate = row and row.tokens_per_second
    bar = "≥ 80,000 tokens/s, aim 120,000"
    found.append(Bar.of("124M, batch 32, context 512", bar, rate, "{:,.0f} tokens/s", bool(rate and rate >= 80_000)))
    return [*found, at_most("124M, prefill of 1024", ours("124M", PREFILL), 1.0, 0.6)]


def _lead_bars(results: Results) -> list[Bar]:
    """Of the 124M model in any case, of the others where there is something to compare."""
    found = []
    for model in MODELS:
        for engine, least in LEADS.items():
            row = results.find(model, "bfloat16", engine, Case.decode(1))
            lead = row and results.lead(row)
            if lead is not None or model == MODELS[0]:
                what = f"{model}, batch 1, against torch {engine}"
                found.append(Bar.of(what, f"≥ {least:g}x", lead, "{:.2f}x", lead is not None and lead >= least))
    return found


def _agreement_bars(results: Results) -> list[Bar]:
    agreement = next((a for a in results.agreements if a.dtype == "float32"), None)
    difference = agreement and agreement.largest_difference
    is_near = difference is not None and difference <= MAX_LOGIT_DIFFERENCE
    same = agreement and agreement.same_tokens
    return [
        Bar.of("float32 logits against transformers", "within 1e-4", difference, "{:.2g}", is_near),
        Bar.of("float32 greedy tokens", "identical over 200 steps", same, "{} the same", same == 200),
    ]


def closing(results: Results) -> str:
    """Everything below the table of cases."""
    parts = [f"- {agreement}" for agreement in results.agreements]
    head = ("bar (bfloat16, one H200)", "to be met", "measured", "")
    table = [head, ("---",) * 4, *((b.what, b.bar, b.measured, b.verdict) for b in bars(results))]
    parts += ["", *map(line, table)]
    for title, items in (("Failed", results.failed), ("Left out", results.left_out)):
        if items:
            parts += ["", f"{title}:", *(f"- {what}: {why}" for what, why in items.items())]
    return "\n".join(parts)
