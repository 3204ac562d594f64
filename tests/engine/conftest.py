"""A fixture of several files."""

import pytest

from support.engines import PRECISIONS


@pytest.fixture(scope="module", params=PRECISIONS.values(), ids=PRECISIONS)
def precision(request):
    """What moves keys and values between slots has to move the scales of an int8 KV cache, too."""
    return request.param
