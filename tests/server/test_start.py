"""What a start does not need is left for later: a server is to answer within a second."""

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")

import os
import subprocess
import sys
import threading

from support.paths import ROOT
from support.serving import served, until
from tinygpt.server.protocol.fields import Model

PROGRAM = """
import sys
import tinygpt.server.app, tinygpt.server.transport.serve
from tinygpt.cli.serve import _server_config
from tinygpt.server.protocol.fields import Model
found, models = [Model], []
while found:
    models.append(found.pop())
    found += models[-1].__subclasses__()
print(len(models) > 20, [model.__name__ for model in models if model.__pydantic_complete__])
print([name for name in ("jinja2", "tinygpt.server.openapi") if name in sys.modules])
"""


def test_importing_the_server_builds_no_model_and_reads_no_jinja():
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["True []", "[]"]


ALONGSIDE = """
import sys
from tinygpt.cli import serve
serve._import_web()
found = set(sys.modules)
import tinygpt.server.app, tinygpt.server.transport.serve
print([*set(sys.modules) - found])
"""


def test_a_second_thread_imports_all_of_the_server():
    """Behind the model's load nothing is left to import before the first request."""
    result = subprocess.run([sys.executable, "-c", ALONGSIDE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_models_are_built_once_the_server_has_started(llm):
    class Late(Model):
        count: int

    assert not Late.__pydantic_complete__
    with served(llm):
        until(lambda: Late.__pydantic_complete__)


@pytest.mark.parametrize("path", ["/v1/completions", "/openapi.json"])
def test_a_request_finds_all_models_built(server, path):
    """However soon it comes: other threads are to find them as they are."""
    server.complete(prompt="a", max_tokens=1)  # takes all turns that are left: the start builds no model from here on

    class Late(Model):
        count: int

    server.state.unbuilt_models = type(server.state)(server.state.llm, server.state.config, 0).unbuilt_models
    assert not Late.__pydantic_complete__
    server.ask(path, {"prompt": "a", "n": 0} if "completions" in path else None)
    assert Late.__pydantic_complete__


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has threads that take no core away")
def test_the_loop_takes_no_core_from_a_kernel(server):
    """Kernels let it run between their phases."""
    if os.sched_getscheduler(threading.main_thread().native_id) != os.SCHED_OTHER:
        pytest.skip("these tests run by another policy")
    assert os.sched_getscheduler(server.thread.native_id) == os.SCHED_BATCH
