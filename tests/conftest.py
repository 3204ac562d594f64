"""Settings for every test."""

import ast
import functools
import gc
import re
from pathlib import Path

import pytest

from support import examples
from support.cuda_compile import need_toolchain
from support.engines import opened
from support.golden_models import write_small_demo
from tinygpt.engine.step_loop import StepTimer
from tinygpt.weights import open as checkpoints

# A statement of a test file with one of these words asks a library of the extra `parity`.
LIBRARIES = re.compile(
    r"@recorded|support\.oracles|HAS_TRANSFORMERS|needs_transformers"
    r"|(import |from |skip\(.)(torch|transformers|peft|openai|nbclient)\b"
)
NEEDED_BY_FILE = re.compile(
    r"^(\w+ = )?pytest\.importorskip\(.(torch|transformers|peft|openai)\b|^pytestmark = needs_transformers",
    re.MULTILINE,
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow`, too")


def pytest_configure(config):
    examples.choose(config.getoption("--slow"))


@pytest.fixture
def single_steps(monkeypatch):
    """One step a call, as on a machine that is too slow for more."""
    monkeypatch.setattr(StepTimer, "num_steps", lambda timer, seconds: 1)


@functools.cache
def asking_names(path: Path) -> set[str]:
    """Return the names of a test file that ask a library, themselves or by another such name of the file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    asking = set()
    uses = {}
    for node in ast.parse(text).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        bound = {alias.asname or alias.name for alias in getattr(node, "names", ())} | {
            getattr(node, "name", "")
        }
        bound |= {target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)}
        for name in bound - {"", "pytestmark"}:
            uses[name] = set(re.findall(r"\w+", source))
            if LIBRARIES.search(source):
                asking.add(name)
    while found := {name for name, words in uses.items() if words & asking} - asking:
        asking |= found
    return asking | ({"pytestmark"} if NEEDED_BY_FILE.search(text) else set())


def pytest_collection_modifyitems(config, items):
    """What runs by its own name, `-m gpu`, needs no --slow."""
    for item in items:
        if asking_names(item.path) & {"pytestmark", item.originalname, *item.fixturenames}:
            item.add_marker("parity")
    if not config.getoption("--slow"):
        for item in items:
            markers = {marker.name for marker in item.iter_markers()}
            if "slow" in markers and "gpu" not in markers:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector takes a third of the time that collecting takes, and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """The garbage collector leaves what was imported and collected alone: thousands of tests, at each gc.collect()."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # of 700, collecting is a tenth of the time that a kernel compiles


def pytest_unconfigure():
    """Leave the millions of objects of compiled kernels to the system: freeing them takes 6 to 9 s."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _toolchain(request):
    if request.node.get_closest_marker("toolchain"):
        need_toolchain()


@pytest.fixture
def device(monkeypatch, request):
    """A SimulatedDevice in the place of the GPU, but for tests that run on one."""
    if request.node.get_closest_marker("gpu"):
        return None
    from support.cuda_device import SimulatedDevice
    from tinygpt.kernels.cuda import device as devices

    device = SimulatedDevice()
    monkeypatch.setattr(devices, "the_device", lambda: device)
    return device


@pytest.fixture(scope="session")
def small_demo(tmp_path_factory) -> str:
    return str(write_small_demo(tmp_path_factory.mktemp("small-demo")))


llm = opened("small_demo", max_num_seqs=4)


# Runs one request at a time and keeps nothing in between.
alone = opened("small_demo", max_num_seqs=1, prefix_cache_seqs=0)


@pytest.fixture(scope="module")
def demo_is_small(small_demo):
    """Commands that leave the model at `demo` load the small one: for what does not depend on the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "DEMO", Path(small_demo))
        yield
