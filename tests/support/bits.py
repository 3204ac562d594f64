"""Bit for bit: how results that must not differ at all are compared."""

import numpy as np


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """No tolerance: NaN is told from NaN, and 0 from -0."""
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
