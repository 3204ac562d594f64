"""The file behind --output: records reach the disk, and whatever goes wrong with it is a sentence that names it."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tinygpt.cli.batch import output_file
from tinygpt.cli.batch.output_file import Earlier, RecordFile, read_earlier
from tinygpt.cli.input.prompts_file import PromptRecord
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.sampling_params import SamplingParams

PROMPTS = [PromptRecord(*fields, None, SamplingParams(), None) for fields in ((1, 1, "The fox"), (2, "é", "It was"))]


class Disk:
    """Stands for the system: counts what is synced, and fails where it is told to."""

    def __init__(self, monkeypatch):
        self.synced: list[str] = []
        self.now, self.room, self.sync_error = 0.0, None, None
        self._fsync, self._write = os.fsync, os.write
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(output_file.time, "monotonic", lambda: self.now)

    def fsync(self, descriptor: int) -> None:
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        self._fsync(descriptor)
        self.synced.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    def write(self, descriptor: int, data) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(descriptor, data[: self.room])
        self.room -= count
        return count


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_records_are_on_the_disk_a_second_later(tmp_path, disk):
    with RecordFile(tmp_path / "out", Earlier()) as file:
        assert disk.synced == ["folder"]  # that the file is there at all
        for now, count in [(0.1, 1), (0.9, 1), (1.0, 2), (1.5, 2), (30, 3), (29, 4), (29.5, 4)]:  # clocks may jump back
            disk.now = now
            file.write("line")
            assert len(disk.synced) == count, now
    assert disk.synced == ["folder", *["file"] * 4]
    assert (tmp_path / "out").read_text() == "line\n" * 7


def test_an_interrupted_run_syncs_too(tmp_path, disk):
    def run():
        with RecordFile(tmp_path / "out", Earlier()) as file:
            file.write("line")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert disk.synced == ["folder", "file"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_sync_is_no_error(tmp_path, disk, number):
    disk.sync_error = number
    with RecordFile(tmp_path / "out", Earlier()) as file:
        file.write("line")
    assert (tmp_path / "out").read_text() == "line\n"


def test_a_folder_that_may_be_written_to_but_not_listed(tmp_path, disk, monkeypatch):
    plain = os.open

    def opened(path, *arguments):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, *arguments)

    monkeypatch.setattr(os, "open", opened)
    with RecordFile(tmp_path / "out", Earlier()) as file:
        file.write("line")
    assert disk.synced == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs /dev/null")
def test_a_device_is_not_synced(disk):
    with RecordFile(Path("/dev/null"), Earlier()) as file:
        file.write("line")
    assert disk.synced == []


def test_a_line_is_written_whole_however_little_is_taken_at_once(tmp_path, disk):
    disk._write, write = lambda descriptor, data: write(descriptor, data[:3]), disk._write
    with RecordFile(tmp_path / "out", Earlier()) as file:
        file.write("a long line")
    assert (tmp_path / "out").read_text() == "a long line\n"


@pytest.mark.parametrize("room", range(12))
def test_a_full_disk_names_the_file_and_says_what_to_do(tmp_path, disk, room):
    path, line = tmp_path / "out", '{"id": 1}'
    disk.room = room
    says = rf"--output {path} cannot be written \(No space left on device\): .* give the same command again"
    with RecordFile(path, Earlier()) as file, pytest.raises(TinyGPTError, match=says):
        file.write(f"{line}\n{line}")
    assert path.read_text() == f"{line}\n{line}\n"[:room]


def test_what_the_disk_loses_is_an_error(tmp_path, disk):
    with pytest.raises(TinyGPTError, match=r"--output .* cannot be written"), RecordFile(tmp_path / "out", Earlier()):
        disk.sync_error = errno.EIO


def test_an_error_of_other_files_is_not_the_outputs(tmp_path):
    with pytest.raises(FileNotFoundError), RecordFile(tmp_path / "out", Earlier()):
        (tmp_path / "absent").read_text()


def test_what_was_half_written_is_cut_off(tmp_path):
    (tmp_path / "out").write_text("whole\nhal")
    with RecordFile(tmp_path / "out", Earlier(size=6, end=9)) as file:
        file.write("next")
    assert (tmp_path / "out").read_text() == "whole\nnext\n"


def test_a_whole_record_whose_line_has_no_end_is_kept(tmp_path):
    """As an editor leaves it, or a kill between the last two bytes."""
    path = tmp_path / "out"
    line = json.dumps({"id": 1, "model": "demo", "dtype": "float32", "prompt": "a", "prompt_token_ids": [5]})
    path.write_text(line)
    earlier = read_earlier(path, [PromptRecord(1, 1, "a", None, None, None)], "demo", "auto")
    assert (earlier.ids, earlier.num_lost_bytes) == ({1}, 0)
    with RecordFile(path, earlier) as file:
        file.write("next")
    assert path.read_text() == f"{line}\nnext\n"
    for cut in range(1, len(line)):
        path.write_text(line[:-cut])
        found = read_earlier(path, [PromptRecord(1, 1, "a", None, None, None)], "demo", "auto")
        assert (found.ids, found.num_lost_bytes, found.lacks_newline) == (frozenset(), len(line) - cut, False)


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "out"
    with RecordFile(path, Earlier()) as file:
        file.write("first")
        with pytest.raises(RequestError, match="is being written by another run: wait for its end"):
            RecordFile(path, Earlier())
    with pytest.raises(RequestError, match="has been written to by another run meanwhile"):
        RecordFile(path, Earlier())  # it had looked before the first run wrote
    with RecordFile(path, Earlier(size=6, end=6)) as file:
        file.write("second")
    assert path.read_text() == "first\nsecond\n"


def test_an_id_that_is_answered_twice_is_refused(tmp_path):
    path = tmp_path / "out"
    line = json.dumps({"id": 1, "model": "demo", "dtype": "float32", "prompt": "a", "prompt_token_ids": [5]})
    path.write_text(f"{line}\n")
    prompts = [PromptRecord(1, 1, "a", None, None, None)]
    assert read_earlier(path, prompts, "demo", "auto").ids == {1}
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(RequestError, match=r"line 2 of --output .* answers id 1 a second time"):
        read_earlier(path, prompts, "demo", "auto")


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_text("x")

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(RequestError, match=rf"--output {path} cannot be read \(Input/output error\)"):
        read_earlier(path, PROMPTS, "demo", "auto")


VALUES = [
    "1" * 4000,
    "1" * 5000,
    "-1",
    "0",
    "3",
    "1e999",
    "NaN",
    "1.0",
    "true",
    "null",
    '"\\ud800"',
    '"a\\u0000b"',
    "[]",
]
VALUES += ['""', "{}", "[" * 3000 + "]" * 3000, '{"a": 1, "a": 2}', '"' + "x" * 5000 + '"', '"/dev/null"', '"é"']


def said_of(path: Path) -> Earlier | str:
    """What is found in the file, or the sentence that refuses it."""
    try:
        return read_earlier(path, PROMPTS, "demo", "auto")
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize("field", ["id", "model", "dtype", "prompt", "prompt_token_ids"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12])
def test_odd_values_in_earlier_records_are_no_answers(tmp_path, field, value):
    """Refused, or where the field is not what decides, an answer; never another error."""
    fields = {"id": "1", "model": '"demo"', "dtype": '"float32"', "prompt": '"The fox"', "prompt_token_ids": "[1]"}
    fields[field] = value
    path = tmp_path / "out"
    path.write_text("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}\n", encoding="utf-8")
    said = said_of(path)
    is_answer = isinstance(said, Earlier) and said.ids == {1} and field in ("dtype", "prompt_token_ids")
    assert is_answer or said.startswith(f"line 1 of --output {path}")
