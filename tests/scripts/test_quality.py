"""The figures that `scripts/quality.py --write` puts into a README's tables."""

import numpy as np
import pytest

from scripts.quality.checkpoints import EXTREMES, OUTLIERS
from scripts.quality.measure import INT8_CACHE, Quality
from scripts.quality.table import fill_tables

PAGE = """Some text.

| `dtype` | a weight | activations | demo | others | same greedy token | largest logit difference |
|---|---|---|---|---|---|---|
| float32 | 4 bytes | float32 | | | | |
| int8 | 1 byte; a scale | int8 | old | old | old | old |
| int8 KV cache | 4 bytes | float32 | old | old | old | old |

int8 is told of between the tables, too.

| `dtype` | values x 100 | others |
|---|---|---|
| int8 | old | old |
| int8, calibrated | old | old |

| int8 | of another table |
"""


def quality(percent: float) -> Quality:
    """What raises a perplexity of 1 by `percent`."""
    return Quality(loss=np.log1p(percent / 100), predictions=1, largest=0.1849, agreements=39, positions=40)


def results() -> dict[str, dict[str, Quality]]:
    changes = dict(
        zip(["demo", *OUTLIERS, *EXTREMES], (0.004, -0.004, 0.126, -0.126, 1.26, 12.6, 3, 4, 5), strict=True)
    )
    exact = {"float32": quality(0)}
    return {
        name: exact
        | {"int8": quality(change), "int8, calibrated": quality(change / 10), INT8_CACHE: quality(change / 100)}
        for name, change in changes.items()
    }


def test_tables_get_new_figures_and_nothing_else_changes():
    lines = fill_tables(PAGE, results(), "demo").splitlines()
    changes = "0.00 % | 0.00 % | +0.13 % | -0.13 % | +1.3 % | +12.6 %"
    assert lines[5] == f"| int8 | 1 byte; a scale | int8 | {changes} | 97.5 % | 0.18 |"
    changes = "0.00 % | 0.00 % | 0.00 % | 0.00 % | +0.01 % | +0.13 %"
    assert lines[6] == f"| int8 KV cache | 4 bytes | float32 | {changes} | 97.5 % | 0.18 |"
    assert lines[12:14] == [
        "| int8 | +3.0 % | +4.0 % | +5.0 % |",
        "| int8, calibrated | +0.30 % | +0.40 % | +0.50 % |",
    ]
    old = PAGE.splitlines()
    assert [line for i, line in enumerate(lines) if i not in (5, 6, 12, 13)] == [
        line for i, line in enumerate(old) if i not in (5, 6, 12, 13)
    ]


def test_a_table_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no table that begins with .* values x 100"):
        fill_tables(PAGE.replace("values x 100", "values"), results(), "demo")
