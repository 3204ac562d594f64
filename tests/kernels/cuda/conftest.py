"""The GPUs that kernels are run for, without one."""

import pytest

from support import cuda_compile

OTHERS = ((8, 6), (12, 0))  # compute capabilities


def pytest_generate_tests(metafunc):
    """With --slow, tests that use `compute_capability` run for each; those on a GPU ask the GPU."""
    if "compute_capability" in metafunc.fixturenames and not metafunc.definition.get_closest_marker("gpu"):
        toolchain = pytest.mark.toolchain
        slow = pytest.mark.slow
        cases = [pytest.param(other, marks=(toolchain, slow)) for other in OTHERS]
        cases.append(pytest.param(cuda_compile.ARCHITECTURE, marks=toolchain))
        metafunc.parametrize("compute_capability", cases, ids=cuda_compile.sm, indirect=True)


@pytest.fixture(scope="module")
def compute_capability(request):
    """Compile for a compute capability the kernels that a test runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_compile, "ARCHITECTURE", getattr(request, "param", cuda_compile.ARCHITECTURE))
        yield
