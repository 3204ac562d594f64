"""Where compiled kernels are kept: one folder for each build, in a place that can be written to."""

import inspect
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from numba.core import config

from support.apart import printed
from tinygpt.kernels.cpu import jit

REPORT = (
    "from tinygpt.kernels.cpu import jit; from tinygpt.kernels.cpu.sampling import philox; folder = jit.cache_folder();"
    "print(folder.path); print(folder.note); print(jit.cache_is_cold('int8'))"
)
RUN_ONE = (
    "import numpy as np; philox.uniform(*np.ones(3, np.uint64)); jit.mark_warm('int8');"
    "print(jit.cache_is_cold('int8')); print(jit.cache_is_cold('int4'))"
)


# The environment is the first thing that the process learns; of the folder it knows nothing yet.
BEGIN = """
import json, os, sys, tempfile
from tinygpt.kernels.cpu import jit
assert not jit.cache_folder.cache_info().currsize
os.environ.clear()
os.environ.update(json.loads(sys.argv[1]))
tempfile.tempdir = None
"""


def report(script=REPORT, **environment):
    """Run the script in a process that has no cache setting but those given, and no kernels elsewhere; its lines."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    with tempfile.TemporaryDirectory() as empty:
        places = kept | {"TMPDIR": empty} | environment
        return printed(BEGIN + script, json.dumps(places), patience=300).splitlines()


def test_fingerprint_changes_with_any_source(tmp_path):
    (tmp_path / "deep").mkdir()
    sources = [tmp_path / "a.py", tmp_path / "deep" / "b.py"]
    for source in sources:
        source.write_text("x = 1\n")
    seen = {jit.fingerprint(tmp_path)}
    assert jit.fingerprint(tmp_path) in seen
    for source in sources:
        source.write_text("x = 2\n")
        seen.add(jit.fingerprint(tmp_path))
    sources[0].rename(tmp_path / "c.py")
    seen.add(jit.fingerprint(tmp_path))
    assert len(seen) == 4
    shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"))
    assert jit.fingerprint(copy) == jit.fingerprint(tmp_path)  # wherever they lie


def test_fingerprint_changes_with_numba_settings_that_change_code(tmp_path, monkeypatch):
    before = jit.fingerprint(tmp_path)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert jit.fingerprint(tmp_path) == before
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CPU_NAME", "generic")
        assert jit.fingerprint(tmp_path) != before
    monkeypatch.chdir(tmp_path)
    assert jit.fingerprint(tmp_path) == before
    (tmp_path / ".numba_config.yaml").write_text("opt: 1\n")
    assert jit.fingerprint(tmp_path) != before


def test_assertions_are_part_of_the_code():
    """python -O compiles none."""
    optimised = compile(inspect.getsource(jit.build), jit.__file__, "exec", optimize=1)
    exec(optimised, names := dict(vars(jit)))
    assert names["build"]() != jit.build()


def test_folder_follows_the_environment_and_warms_up(tmp_path):
    path, note, cold = report(XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path / "home"))
    if sys.platform == "linux":
        assert Path(path).parent == tmp_path / "tinygpt"
    assert (note, cold) == ("", "True")
    *_, before, after, other = report(f"{REPORT}; {RUN_ONE}", NUMBA_CACHE_DIR=str(tmp_path / "own"))
    assert (before, after, other) == ("True", "False", "True")
    path, note, cold = report(NUMBA_CACHE_DIR=str(tmp_path / "own"))
    assert (Path(path).parent, note, cold) == (tmp_path / "own", "", "False")


def test_a_first_run_is_one_before_any_kernel_is_kept(tmp_path):
    is_first, run_one = "print(jit.is_first_run())", "import numpy as np; philox.uniform(*np.ones(3, np.uint64))"
    script = f"{REPORT}; {is_first}; {run_one}; {is_first}"
    *_, before, after = report(script, NUMBA_CACHE_DIR=str(tmp_path))
    assert (before, after) == ("True", "False")
    (blocked := tmp_path / "file").write_text("")
    assert report(script, NUMBA_CACHE_DIR=str(blocked), TMPDIR=str(tmp_path))[-2] == "False"


def test_unwritable_cache_falls_back_and_says_so(tmp_path):
    blocked = tmp_path / "file"  # a file, since the permissions of a folder do not stop root
    blocked.write_text("")
    path, note, _ = report(NUMBA_CACHE_DIR=str(blocked / "cache"), TMPDIR=str(tmp_path))
    assert tmp_path in Path(path).parents
    assert str(blocked) in note
    assert "NUMBA_CACHE_DIR" in note


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of folders on Windows")
@pytest.mark.parametrize("trap", ["writable by others", "a link"])
def test_a_temporary_folder_that_others_control_is_not_used(tmp_path, trap):
    """Kernels then stay in memory, and nothing is left behind."""
    target = tmp_path / f"tinygpt-{os.getuid()}"
    if trap == "a link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    else:
        target.mkdir()
        target.chmod(0o777)
    blocked = tmp_path / "file"
    blocked.write_text("")
    before = set(tmp_path.rglob("*"))
    path, note, *_, is_cold, _ = report(
        f"{REPORT}; {RUN_ONE}", NUMBA_CACHE_DIR=str(blocked / "cache"), TMPDIR=str(tmp_path)
    )
    assert (path, is_cold) == ("None", "True")
    assert "in memory" in note
    assert set(tmp_path.rglob("*")) == before


def test_other_packages_keep_their_cache_folder(monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", "theirs")

    @jit.jit
    def kernel(x):
        return x

    assert config.CACHE_DIR == "theirs"
    assert kernel.stats.cache_path == str(jit.cache_folder().path)


def test_floating_point_is_strict():
    @jit.jit
    def adds_in_order(x, y):
        return (x + y) - x  # 0 under strict IEEE where y is lost in x; y if a compiler may reorder

    @jit.jit
    def is_nan(x):
        return x != x

    assert adds_in_order(1e30, 1.0) == 0.0
    assert is_nan(float("nan"))
