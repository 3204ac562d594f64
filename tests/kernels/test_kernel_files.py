"""Compiled kernels as files: what is damaged, planted or cut short is never loaded, and a full disk ends no run."""

import errno
import hashlib
import hmac
import logging
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support.paths import ROOT
from tinygpt.kernels import kernel_files
from tinygpt.kernels.cache_folder import CacheFolder
from tinygpt.kernels.kernel_files import DIGEST_SIZE, HEADER, KEY_SIZE, MAGIC, KernelFiles

NAME, BODY = "add-0123.kernel", b"machine code" * 5
needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files on Windows")
needs_root = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give a file away")


@pytest.fixture
def files(tmp_path) -> KernelFiles:
    files = KernelFiles(tmp_path / "build")
    files.save(NAME, BODY)
    return files


def anew(files: KernelFiles) -> KernelFiles:
    """As the next process finds them."""
    return KernelFiles(files.folder)


def test_what_was_saved_is_loaded_under_its_name_alone(files):
    assert anew(files).load(NAME) == BODY
    (files.folder / NAME).rename(files.folder / "other.kernel")
    assert anew(files).load(NAME) is None
    assert anew(files).load("other.kernel") is None


@needs_owners
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_what_is_kept(tmp_path, mask):
    before = os.umask(mask)
    try:
        files = KernelFiles(tmp_path / "build")
        files.save(NAME, BODY)
    finally:
        os.umask(before)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {0o600}
    assert {path.name for path in files.folder.iterdir()} == {NAME, "key"}


DAMAGES = {
    "emptied": lambda content: b"",
    "halved": lambda content: content[: len(content) // 2],
    "without its body": lambda content: content[:HEADER],
    "longer": lambda content: content + b"\0",
    "garbage": lambda content: os.urandom(len(content)),
    "of another version": lambda content: content.replace(b"kernel 1", b"kernel 0"),
    "with a checksum and no key": lambda content: MAGIC + hashlib.sha256(BODY).digest() + BODY,
    "under a guessed key": lambda content: MAGIC + hmac.digest(bytes(KEY_SIZE), BODY, "sha256") + BODY,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_deleted_and_written_again(files, damage):
    path = files.folder / NAME
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert anew(files).load(NAME) is None
    assert not path.exists()
    anew(files).save(NAME, BODY)
    assert anew(files).load(NAME) == BODY


def test_any_flipped_bit_is_seen(files):
    path = files.folder / NAME
    content = path.read_bytes()
    assert len(content) == len(MAGIC) + DIGEST_SIZE + len(BODY)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert files.load(NAME) is None
    path.write_bytes(content)
    assert files.load(NAME) == BODY


@pytest.mark.parametrize("odd", ["folder", "link", "pipe"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(files, odd, tmp_path):
    path = files.folder / NAME
    content = path.read_bytes()
    path.unlink()
    if odd == "folder":
        path.mkdir()
    elif odd == "pipe":
        getattr(os, "mkfifo", lambda path: pytest.skip("no pipes in folders on Windows"))(path)
    else:
        (tmp_path / "target").write_bytes(content)
        path.symlink_to(tmp_path / "target")
    assert anew(files).load(NAME) is None
    anew(files).save(NAME, BODY)
    assert odd == "folder" or anew(files).load(NAME) == BODY


def test_damage_is_told_to_those_who_debug(files, caplog):
    (files.folder / NAME).write_bytes(b"")
    with caplog.at_level(logging.DEBUG, "tinygpt"):
        anew(files).load(NAME)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert str(files.folder / NAME) in caplog.text


def test_each_kernel_that_is_read_is_told_to_those_who_debug(files, caplog):
    files.save_object(NAME, lambda: pickle.dumps("code"))
    with caplog.at_level(logging.DEBUG, "tinygpt"):
        assert anew(files).load_object(NAME, str.upper) == "CODE"
    assert caplog.messages == [f"{NAME} is read"]


def readable(key: Path) -> None:
    key.chmod(0o644)


def someone_elses(key: Path) -> None:
    os.chown(key, 12345, 12345)


def short(key: Path) -> None:
    key.write_bytes(b"short")


def linked(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(readable, marks=needs_owners),
        pytest.param(someone_elses, marks=[needs_owners, needs_root]),
        short,
        pytest.param(linked, marks=needs_owners),
        Path.unlink,
    ],
)
def test_a_key_that_is_no_secret_is_replaced_and_nothing_loaded_with_it(files, spoil):
    key = files.folder / "key"
    before = key.read_bytes()
    spoil(key)
    assert anew(files).load(NAME) is None
    assert key.read_bytes() != before
    anew(files).save(NAME, BODY)
    assert anew(files).load(NAME) == BODY


def test_without_a_key_nothing_is_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernel_files, "_read_key", lambda path: None)
    files = KernelFiles(tmp_path)
    for _ in range(2):
        files.save(NAME, BODY)
        assert files.load(NAME) is None
    assert not files.names()
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text


def test_two_that_make_a_key_at_once_end_with_the_same(tmp_path, monkeypatch):
    """The second one makes its key when the first has found none, and is about to put its own there."""
    link, first, second = os.link, KernelFiles(tmp_path), KernelFiles(tmp_path)

    def overtaken(*paths):
        monkeypatch.setattr(os, "link", link)
        second.save("second.kernel", BODY)
        link(*paths)

    monkeypatch.setattr(os, "link", overtaken)
    first.save("first.kernel", BODY)
    assert first.load("second.kernel") == second.load("first.kernel") == BODY


def test_processes_on_a_cold_cache_end_with_one_key(tmp_path):
    script = (
        "import sys; from pathlib import Path; from tinygpt.kernels.kernel_files import KernelFiles;"
        f"sys.stdin.read(); KernelFiles(Path({str(tmp_path)!r})).save(sys.argv[1], b'code')"
    )
    commands = [[sys.executable, "-c", script, f"{number}.kernel"] for number in range(4)]
    started = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) for command in commands]
    for process in started:
        process.stdin.close()
    assert [process.wait() for process in started] == [0] * 4
    assert len(KernelFiles(tmp_path).names()) == 4
    assert all(KernelFiles(tmp_path).load(name) == b"code" for name in KernelFiles(tmp_path).names())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("has_key", [True, False])
def test_a_disk_that_takes_no_more_is_told_once(tmp_path, monkeypatch, caplog, number, has_key):
    class Full:
        def __init__(self, descriptor):
            self.descriptor = descriptor

        def __enter__(self):
            return self

        def __exit__(self, *_):
            os.close(self.descriptor)

        def write(self, content):
            os.write(self.descriptor, content[:5])
            raise OSError(number, os.strerror(number))

    def open_full(file, mode, **options):
        return Full(file) if mode == "wb" else open(file, mode, **options)

    files = KernelFiles(tmp_path)
    if has_key:
        files.save("before.kernel", BODY)
    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(kernel_files, "open", open_full, raising=False)
        files.save("one.kernel", BODY)
        files.save("two.kernel", BODY)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path) in record.getMessage()
    assert os.strerror(number) in record.getMessage()
    assert set(tmp_path.iterdir()) == before
    files.mark("int8")  # some of its kernels could not be kept
    assert files.marks() == []


def test_what_a_full_disk_does_not_take_goes_to_the_spare_folder(tmp_path, monkeypatch, caplog):
    first, spare = tmp_path / "first", tmp_path / "spare"
    first.mkdir()

    def find_spare(is_made):
        if is_made:
            spare.mkdir(exist_ok=True)
        return spare if spare.is_dir() else None

    def fill(files):
        """No file can be written to the first folder any more."""
        make = tempfile.mkstemp

        def mkstemp(*, suffix, dir):
            if dir == files.folder:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return make(suffix=suffix, dir=dir)

        monkeypatch.setattr(tempfile, "mkstemp", mkstemp)

    files = KernelFiles(first, find_spare)
    files.save("before.kernel", BODY)
    assert not spare.exists()
    fill(files)
    files.save("one.kernel", BODY)
    files.save("two.kernel", BODY)
    (record,) = caplog.records
    assert str(first) in record.getMessage()
    assert str(spare) in record.getMessage()
    files.mark("int8")
    later = KernelFiles(first, find_spare)
    assert later.names() == {"before.kernel", "one.kernel", "two.kernel"}
    assert later.marks() == ["int8"]
    assert later.folders == [first, spare]
    assert all(later.load(name) == BODY for name in later.names())
    (spare / "one.kernel").unlink()
    assert KernelFiles(first, find_spare).marks() == []


def test_a_disk_that_is_full_from_the_start_has_no_key(tmp_path, monkeypatch):
    (spare := tmp_path / "spare").mkdir()
    files = KernelFiles(tmp_path / "first", lambda is_made: spare)
    monkeypatch.setattr(KernelFiles, "_make_key", lambda self: _make_key_but_in(self, tmp_path / "first"))
    files.save("one.kernel", BODY)
    assert files.load("one.kernel") == BODY
    assert files.is_keeping


_make_key = KernelFiles._make_key


def _make_key_but_in(files, full):
    if files.folder == full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _make_key(files)


def test_the_log_has_the_note_of_a_folder_in_an_unusual_place(tmp_path, caplog):
    files = KernelFiles.in_folder(CacheFolder(tmp_path, "kept elsewhere"))
    assert (files.folder, caplog.messages) == (tmp_path, ["kept elsewhere"])
    assert KernelFiles.in_folder(CacheFolder(None)).folder is None
    assert len(caplog.messages) == 1


def test_windows_may_refuse_to_replace_what_is_being_read(files, monkeypatch, caplog):
    def refuse(*paths):
        raise PermissionError(errno.EACCES, "Access is denied")

    monkeypatch.setattr(kernel_files, "HAS_OWNERS", False)
    monkeypatch.setattr(os, "replace", refuse)
    files.save(NAME, BODY)
    assert not caplog.records
    files.save("other.kernel", BODY)
    assert len(caplog.records) == 1


def test_a_mark_holds_as_long_as_its_kernels(files):
    files.save("other.kernel", BODY)
    files.mark("int8")
    assert anew(files).marks() == ["int8"]
    files.save("later.kernel", BODY)
    assert anew(files).marks() == ["int8"]
    (files.folder / NAME).unlink()
    assert anew(files).marks() == []
    (files.folder / "float32.warm").write_bytes(b"")
    (files.folder / "int4.warm").write_bytes(b"\xff\xfe")
    assert anew(files).marks() == []


def test_what_a_killed_process_left_is_removed_some_day(files):
    old, young = files.folder / "old.part", files.folder / "young.part"
    for part in (old, young):
        part.write_bytes(b"half")
    os.utime(old, (0, time.time() - 3 * 24 * 3600))
    files.save(NAME, BODY)
    assert not old.exists()
    assert young.exists()


def test_a_folder_that_was_tidied_away_is_made_again(files):
    for path in files.folder.iterdir():
        path.unlink()
    files.folder.rmdir()
    assert files.load(NAME) is None
    files.save(NAME, BODY)
    assert files.load(NAME) == BODY


def test_without_a_folder_nothing_is_kept_and_nothing_said(caplog):
    files = KernelFiles(None)
    files.save(NAME, BODY)
    files.mark("int8")
    assert (files.load(NAME), files.names(), files.marks()) == (None, set(), [])
    assert not caplog.records
