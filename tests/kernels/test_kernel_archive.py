"""Kernels exported to a file and imported from it: all of them, or one sentence and none."""

import hashlib
import json
import os
import stat

import pytest

from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.kernels import kernel_archive
from tinygpt.kernels.kernel_archive import DIGEST_BYTES, MAGIC, SIZE_BYTES, export_kernels, import_kernels
from tinygpt.kernels.kernel_files import KernelFiles

PYTHON = "3.11.2 (main, Mar 13 2023, 12:18:29) [GCC 12.2.0]"
BUILD = {"CPU": "znver4", "list of CPU features": "+avx2,+avx512f,-amx", "Python": PYTHON, "Numba": "0.68.1"}
ADD, MULTIPLY = f"add-{'0' * 32}.kernel", f"multiply-{'a1' * 16}.kernel"
BODIES = {ADD: b"adds", MULTIPLY: b"multiplies" * 100}


@pytest.fixture
def archive(tmp_path):
    files = KernelFiles(tmp_path / "theirs")
    for name, body in BODIES.items():
        files.save(name, body)
    files.mark("int8")
    assert export_kernels(tmp_path / "kernels.bin", files, BUILD) == 2
    return tmp_path / "kernels.bin"


@pytest.fixture
def ours(tmp_path):
    return KernelFiles(tmp_path / "ours")


def taken_apart(archive) -> tuple[dict, bytes]:
    data = archive.read_bytes()
    size = int.from_bytes(data[len(MAGIC) :][:SIZE_BYTES], "little")
    start = len(MAGIC) + SIZE_BYTES + DIGEST_BYTES
    return json.loads(data[start : start + size]), data[start + size :]


def put_together(archive, header, bodies: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length, digest = len(text).to_bytes(SIZE_BYTES, "little"), hashlib.sha256(text).digest()
    archive.write_bytes(MAGIC + length + digest + text + bodies)


def refused(archive, files, build=BUILD) -> str:
    """The one sentence; and there is nothing but what was there."""
    before = {path for path in files.folder.rglob("*")} if files.folder.exists() else set()
    with pytest.raises(RequestError) as caught:
        import_kernels(archive, files, build)
    assert ({path for path in files.folder.rglob("*")} if files.folder.exists() else set()) == before
    assert str(caught.value).startswith(str(archive))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{archive} ")


def test_what_is_imported_is_this_users_own(archive, ours, tmp_path):
    assert import_kernels(archive, ours, BUILD) == 2
    again = KernelFiles(ours.folder)
    assert {name: bytes(again.load(name)) for name in again.names()} == BODIES
    assert again.marks() == ["int8"]
    assert (tmp_path / "theirs/key").read_bytes() != (tmp_path / "ours/key").read_bytes()
    assert (tmp_path / "theirs" / ADD).read_bytes() != (tmp_path / "ours" / ADD).read_bytes()
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "ours" / ADD).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"CPU": "skylake-avx512"}, "was made where the CPU is znver4, and here it is skylake-avx512: export"),
        ({"Python": "3.12.1 (main, May 2)"}, f"the Python is {PYTHON}, and here it is 3.12.1 (main, May 2): export"),
        (
            {"list of CPU features": "+avx2,-avx512f,-amx"},
            "the list of CPU features is +avx512f, and here it is -avx512f",
        ),
        ({"llvmlite": "0.50"}, "the llvmlite is unknown, and here it is 0.50"),
    ],
)
def test_a_difference_is_named(archive, ours, change, expected):
    assert expected in refused(archive, ours, BUILD | change)


def test_every_byte_counts(archive, ours):
    """Whichever is another one, and wherever the file ends."""
    data = archive.read_bytes()
    places = [*range(0, len(data) - 1000, 7), len(data) - 999, len(data) - 1]
    for place in places:
        archive.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        refused(archive, ours)
        archive.write_bytes(data[:place])
        refused(archive, ours)
    archive.write_bytes(data + b"x")
    assert "there is more in it" in refused(archive, ours)


@pytest.mark.parametrize(
    "name",
    [
        f"../../add-{'0' * 32}.kernel",
        f"/tmp/add-{'0' * 32}.kernel",
        f"a/b-{'0' * 32}.kernel",
        f"a\\b-{'0' * 32}.kernel",
        f"add-{'0' * 32}.kernel\n",
        f"a\0b-{'0' * 32}.kernel",
        "key",
        "",
        5,
        None,
    ],
)
def test_no_name_leaves_the_folder(archive, ours, name):
    header, bodies = taken_apart(archive)
    header["kernels"][0][0] = name
    put_together(archive, header, bodies)
    assert "its header cannot be read" in refused(archive, ours)


@pytest.mark.parametrize("mark", ["../int8", "/int8", ".", "..", "", "a/b", "x" * 200, 7, ["int8"]])
def test_no_mark_leaves_the_folder(archive, ours, mark):
    header, bodies = taken_apart(archive)
    put_together(archive, header | {"marks": [mark]}, bodies)
    assert "its header cannot be read" in refused(archive, ours)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"build": [], "marks": [], "kernels": []}',
        b'{"build": {"CPU": 1}, "marks": [], "kernels": []}',
        b'{"build": {}, "marks": null, "kernels": []}',
        b'{"build": {}, "marks": [], "kernels": [7]}',
        b'{"build": {}, "marks": [], "kernels": [["a", 1]]}',
        b'{"build": {}, "marks": "ab", "kernels": []}',
        b'{"build": {}, "marks": {"a": 1}, "kernels": []}',
        b'{"build": {}, "marks": [], "kernels": {}}',
        json.dumps({"build": {}, "marks": ["a"] * 101, "kernels": []}).encode(),
        json.dumps({"build": {}, "marks": [], "kernels": [[ADD, 4, "0"]] * 2}).encode(),
        b'{"build": {}, "marks": [], "kernels": [], "more": 1}',
    ],
)
def test_a_header_of_another_form(archive, ours, header):
    put_together(archive, header, b"")
    assert "its header cannot be read" in refused(archive, ours)


@pytest.mark.parametrize("size", [-1, 1.5, True, "4", None])
def test_a_size_that_is_none(archive, ours, size):
    header, bodies = taken_apart(archive)
    header["kernels"][0][1] = size
    put_together(archive, header, bodies)
    assert "its header cannot be read" in refused(archive, ours)


def test_more_than_there_can_be_is_not_read(archive, ours, monkeypatch):
    """Nor is memory asked for it."""
    header, bodies = taken_apart(archive)
    header["kernels"][0][1] = 1 << 60
    put_together(archive, header, bodies)
    assert "has more than" in refused(archive, ours)
    archive.write_bytes(MAGIC + (1 << 62).to_bytes(SIZE_BYTES, "little"))
    assert "its header cannot be read" in refused(archive, ours)
    header["kernels"] = [[ADD.replace("add", name), 0, hashlib.sha256().hexdigest()] for name in "abc"]
    put_together(archive, header, b"")
    monkeypatch.setattr(kernel_archive, "MAX_KERNELS", 2)
    assert "has more than 2 kernels" in refused(archive, ours)


def test_what_is_no_such_file(tmp_path, ours):
    (tmp_path / "text").write_text("Once upon a time")
    assert "is no file of `tinygpt warmup --export`" in refused(tmp_path / "text", ours)
    assert "cannot be read: No such file" in refused(tmp_path / "nothing", ours)
    assert "cannot be read" in refused(tmp_path, ours)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFO")
def test_a_fifo_is_not_waited_for(tmp_path, ours):
    os.mkfifo(tmp_path / "fifo")
    assert "it is a FIFO" in refused(tmp_path / "fifo", ours)


def test_an_export_writes_over_nothing_and_leaves_damaged_kernels_out(archive, tmp_path):
    files, before = KernelFiles(tmp_path / "theirs"), archive.read_bytes()
    with pytest.raises(RequestError, match="is there already"):
        export_kernels(archive, files, BUILD)
    assert archive.read_bytes() == before
    (files.folder / ADD).write_bytes(b"damaged")
    assert export_kernels(tmp_path / "second", files, BUILD) == 1
    files.save("mine.kernel", b"code")
    with pytest.raises(RequestError, match=r"^mine\.kernel lies among the kernels and is none of tinygpt's"):
        export_kernels(tmp_path / "third", files, BUILD)
    with pytest.raises(RequestError, match="no kernels to export"):
        export_kernels(tmp_path / "third", KernelFiles(None), BUILD)
    assert not (tmp_path / "third").exists()


def test_kernels_that_cannot_be_kept_are_a_failure(archive):
    with pytest.raises(TinyGPTError, match="could not be kept"):
        import_kernels(archive, KernelFiles(None), BUILD)


def test_an_export_is_whole_or_nothing(tmp_path, monkeypatch):
    """Nor is one written that every import would refuse."""
    files = KernelFiles(tmp_path / "theirs")
    for name, body in BODIES.items():
        files.save(name, body)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_archive, "MAGIC", "no bytes")  # what fails once the file is there
        with pytest.raises(TypeError):
            export_kernels(tmp_path / "kernels.bin", files, BUILD)
    assert not (tmp_path / "kernels.bin").exists()
    monkeypatch.setattr(kernel_archive, "MAX_BYTES", 100)
    with pytest.raises(RequestError, match=r"the kernels' folder has more than 2000 kernels, or more than 0 MB"):
        export_kernels(tmp_path / "kernels.bin", files, BUILD)
