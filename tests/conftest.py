"""Settings for every test."""

import pytest
from hypothesis import settings

from support.cuda_compile import need_toolchain

# A first example may wait for a kernel to compile, so no deadline.
settings.register_profile("tinygpt", deadline=None, print_blob=True)
settings.load_profile("tinygpt")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow`, too")


def pytest_collection_modifyitems(config, items):
    """What runs by its own name, `-m gpu` or `-m toolchain`, needs no --slow."""
    if not config.getoption("--slow"):
        for item in items:
            markers = {marker.name for marker in item.iter_markers()}
            if "slow" in markers and not markers & {"gpu", "toolchain"}:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(autouse=True)
def _toolchain(request):
    if request.node.get_closest_marker("toolchain"):
        need_toolchain()
