"""Settings for every test."""

import pytest
from hypothesis import settings

from support.cuda_compile import need_toolchain

# A first example may wait for a kernel to compile, so no deadline.
settings.register_profile("tinygpt", deadline=None, print_blob=True)
settings.load_profile("tinygpt")


@pytest.fixture(autouse=True)
def _toolchain(request):
    if request.node.get_closest_marker("toolchain"):
        need_toolchain()
