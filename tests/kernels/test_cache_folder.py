"""Where compiled kernels are kept: in a folder that no other user can write to or replace."""

import os
import stat
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinygpt.kernels import cache_folder
from tinygpt.kernels.cache_folder import find_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of folders on Windows")
needs_root = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give a folder away")


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    """The user's cache folder, made; a temporary folder lies beside it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "above" / "base"))
    (tmp_path / "above" / "base").mkdir(parents=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "above" / "base"


@contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def assert_refused(base: Path, *words: str) -> None:
    """The fallback is used, and one sentence says what is wrong with the folder."""
    found = find_folder("build")
    temporary = base.parents[1] / "temporary" / f"tinygpt-{os.geteuid()}"
    assert found.path == temporary / "build"
    assert found.note.startswith(f"compiled kernels cannot be kept in {base} (")
    assert all(word in found.note for word in (*words, str(temporary), "NUMBA_CACHE_DIR"))


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_folders_are_made_for_their_user_alone(base, monkeypatch, mask):
    base.rmdir()
    base.parent.rmdir()
    with umask(mask):
        assert find_folder("build").path == base / "build"
    made = (base.parent, base, base / "build")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 3


@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_below_one_that_others_may_write_to_is_refused(base, depth):
    folder = (base, base.parent)[depth]
    folder.chmod(0o777)
    assert_refused(base, f"others may write to {folder}")
    assert not list(base.iterdir())
    folder.chmod(0o1777)  # as /tmp is
    assert find_folder("build").path == base / "build"


def test_the_folder_itself_must_be_closed_even_where_it_is_sticky(base):
    (base / "build").mkdir()
    (base / "build").chmod(0o1777)
    assert_refused(base, f"others may write to {base / 'build'}")


def test_a_group_may_write_only_if_it_is_the_users_own(base, monkeypatch):
    group = SimpleNamespace(gr_name="me", gr_mem=[])
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    monkeypatch.setattr("pwd.getpwuid", lambda number: SimpleNamespace(pw_name="me", pw_gid=base.stat().st_gid))
    base.chmod(0o770)
    assert find_folder("build").path == base / "build"
    group.gr_mem = ["me", "somebody"]
    assert_refused(base, f"others may write to {base}")
    group.gr_name, group.gr_mem = "staff", []
    assert_refused(base, f"others may write to {base}")


@needs_root
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_of_another_user_is_refused(base, depth):
    (base / "build").mkdir()
    folder = (base / "build", base, base.parent)[depth]
    os.chown(folder, 12345, 12345)
    assert_refused(base, f"{folder} belongs to another user")


def test_roots_folders_may_lie_above_but_not_hold_the_kernels(base, monkeypatch):
    """Seen as by a user whose folder lies below those of root, or of whoever runs this."""
    (base / "build").mkdir()
    status = os.lstat(base)
    root_owned = os.stat_result((status.st_mode, 0, 0, 1, 0, 0, *status[6:]))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache_folder._distrust(base, root_owned, is_ours=False) == ""
    assert cache_folder._distrust(base, root_owned, is_ours=True) == f"{base} belongs to another user"


def test_a_link_is_followed_and_what_it_leads_to_is_checked(base, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    base.rmdir()
    base.symlink_to(tmp_path / "elsewhere")
    assert find_folder("build").path == tmp_path / "elsewhere" / "build"
    (tmp_path / "elsewhere").chmod(0o777)
    assert_refused(base, f"others may write to {tmp_path / 'elsewhere'}")


def test_a_link_that_leads_nowhere_is_refused(base):
    base.rmdir()
    base.symlink_to(base)
    assert_refused(base)


def test_where_no_folder_will_do_kernels_stay_in_memory(base):
    base.chmod(0o777)
    (base.parents[1] / "temporary").chmod(0o777)
    found = find_folder("build")
    assert found.path is None
    assert "this run keeps them in memory" in found.note
    assert not list(base.iterdir())


def test_where_nothing_can_be_written_kernels_stay_in_memory(base, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr("tempfile.gettempdir", full)
    found = find_folder("build")
    assert found.path is None
    assert "No space left on device" in found.note
