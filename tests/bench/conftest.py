"""What tests of benchmarks share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _demo_is_small(demo_is_small):
    """Nothing that is measured is looked at."""
