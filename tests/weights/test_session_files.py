"""Files of sessions: whatever one says, it is a session that was saved, or one sentence on why it is none."""

import errno
import json
import os
import re
import socket
import stat
import struct
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from support.examples import examples
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.weights.stored.session_file import SavedSession, checked_file, read_session, write_session

L, H, T, D, V = 2, 3, 5, 4, 11
MADE_BY = {"vocab_size": V, "n_layer": L, "n_head": H, "n_embd": H * D, "eos_token_ids": [7], "dtype": "float32"}
TOKEN_IDS = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16, "int8": np.int8}


def kv(kind=np.float32, count=T, seed=0) -> np.ndarray:
    """Keys or values; their bits where they are bfloat16, and with a float32 behind them where they are int8."""
    drawn = np.random.default_rng(seed).normal(size=(L, H, count, D))
    if kind == np.int8:
        scales = np.abs(drawn[..., :1]).astype(np.float32)
        return np.concatenate([(50 * drawn).clip(-127, 127).astype(kind), scales.view(kind)], axis=-1)
    return drawn.astype(kind) if kind != np.uint16 else (drawn.astype(np.float32).view(np.uint32) >> 16).astype(kind)


def none_of(kind=np.float32) -> np.ndarray:
    return kv(kind, count=0)


def read(path: Path, kind=np.float32, max_positions: int = 100) -> SavedSession:
    return read_session(path, MADE_BY, none_of(kind), max_positions)


def forged(path: Path, arrays=(), drop=(), **metadata) -> Path:
    """A file that says whatever it is told to, with the right checksum where there can be one."""
    held = {"token_ids": np.array(TOKEN_IDS, np.int32), "k": kv(), "v": kv(seed=1)} | dict(arrays)
    held = {name: np.array(array, order="C") for name, array in held.items()}
    about = {"format": "tinygpt session", "version": "1", "first": "0", "made_by": json.dumps(MADE_BY)} | metadata
    if "crc32" not in about and all(isinstance(about[name], str) for name in ("first", "made_by")):
        checksum = zlib.crc32((about["first"] + about["made_by"]).encode(errors="surrogatepass"))
        for name in ("token_ids", "k", "v"):
            checksum = zlib.crc32(held[name].tobytes(), checksum)
        about["crc32"] = f"{checksum:08x}"
    held = {name: array for name, array in held.items() if name not in drop}
    path.write_bytes(with_metadata(save(held), {k: v for k, v in about.items() if k not in drop}))
    return path


def with_metadata(data: bytes, metadata) -> bytes:
    """A safetensors file with this in the place of its metadata, which the library would not write."""
    (size,) = struct.unpack_from("<Q", data)
    header = json.dumps(json.loads(data[8 : 8 + size]) | {"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def refusal(path: Path, **options) -> str:
    """What the one sentence says; any other exception, and none at all, fails."""
    with pytest.raises(CheckpointError) as caught:
        read(path, **options)
    text = str(caught.value)
    assert str(path) in text
    assert len(text) < 2000 + len(str(path))
    assert text.replace(str(path), "").isprintable()
    return text


# --- what is right


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("first", "count"), [(0, 5), (2, 5), (3, 5), (8, 0), (0, 0)])
def test_what_was_written_is_read(tmp_path, kind, first, count):
    k, v = kv(kind, count), kv(kind, count, seed=1)
    write_session(tmp_path / "a", SavedSession(TOKEN_IDS, first, k, v), MADE_BY)
    session = read(tmp_path / "a", kind)
    assert (session.token_ids, session.first) == (TOKEN_IDS, first)
    assert (session.k.dtype, session.v.dtype) == (k.dtype, v.dtype)
    assert np.array_equal(session.k, k)
    assert np.array_equal(session.v, v)
    assert read(forged(tmp_path / "b")).token_ids == TOKEN_IDS  # what the tests below change is right as it is


def test_an_empty_session(tmp_path):
    write_session(tmp_path / "a", SavedSession([], 0, kv(count=0), kv(count=0)), MADE_BY)
    assert read(tmp_path / "a").token_ids == []


# --- metadata


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "another"}, "is no session that tinygpt saved"),
        ({"version": "2\x1b[2J" + "9" * 5000}, "is in version '2"),
        ({"crc32": "0"}, "does not have the checksum"),
        ({"made_by": "{"}, "does not say which model"),
        ({"made_by": ""}, "does not say which model"),
        ({"made_by": "[]"}, "does not say which model"),
        ({"made_by": "null"}, "does not say which model"),
        ({"made_by": "7" * 5000}, "does not say which model"),
        ({"made_by": DEEP}, "does not say which model"),
        ({"made_by": '{"vocab_size":' * 100_000}, "does not say which model"),
        ({"made_by": "{}"}, "vocab_size is None there and 11 here"),
        ({"made_by": json.dumps(MADE_BY | {"n_head": "x" * 9999})}, "n_head is 'xxx"),
        ({"made_by": json.dumps(MADE_BY | {"n_head": [[[[[[[[3]]]]]]]]})}, r"n_head is \[\[\["),
        ({"made_by": json.dumps(MADE_BY | {"rope": 1})}, "'rope' is 1 there and None here"),
        ({"made_by": json.dumps({str(i): i for i in range(9999)})}, "and 10000 more"),
        *(
            ({"first": first}, "at no place among them")
            for first in ("-1", "4", "9" * 5000, "1.0", " 1", "", "٣", "0x0")
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_odd_metadata(tmp_path, metadata, message):
    assert re.search(message, refusal(forged(tmp_path / "a", **metadata)))


@pytest.mark.parametrize("name", ["format", "version", "first", "made_by", "crc32"])
@pytest.mark.parametrize("value", [None, 0, 1.5, True, [], {}, "\ud800"], ids=repr)
def test_metadata_of_another_type(tmp_path, name, value):
    refusal(forged(tmp_path / "a", **{name: value}))


@pytest.mark.parametrize("name", ["format", "version", "first", "made_by", "crc32"])
def test_metadata_that_is_not_there(tmp_path, name):
    refusal(forged(tmp_path / "a", drop=[name]))


@pytest.mark.parametrize("metadata", [None, [], "", 7, {}], ids=repr)
def test_no_metadata(tmp_path, metadata):
    (tmp_path / "a").write_bytes(with_metadata(forged(tmp_path / "b").read_bytes(), metadata))
    refusal(tmp_path / "a")


# --- arrays


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"token_ids": np.array([TOKEN_IDS], np.int32)}, r"its token_ids is \('I32', \[1, 8\]\)"),
        ({"token_ids": np.array(TOKEN_IDS, np.int64)}, "its token_ids is .*'I64'"),
        ({"token_ids": np.array(TOKEN_IDS, np.uint32)}, "its token_ids is .*'U32'"),
        ({"token_ids": np.array(TOKEN_IDS, np.float32)}, "its token_ids is .*'F32'"),
        ({"token_ids": np.array(TOKEN_IDS, bool)}, "its token_ids is .*'BOOL'"),
        ({"token_ids": np.array(1, np.int32)}, r"its token_ids is \('I32', \[\]\)"),
        ({"token_ids": np.array([], np.int32)}, "0 tokens, and keys and values of 5"),
        ({"token_ids": np.array(TOKEN_IDS[:4], np.int32)}, "4 tokens, and keys and values of 5"),
        ({"token_ids": np.array([*TOKEN_IDS, -1], np.int32)}, "token id -1, and this model has 11"),
        ({"token_ids": np.array([*TOKEN_IDS, V], np.int32)}, "token id 11, and this model has 11"),
        ({"k": kv(np.float64)}, "its k is .*'F64'"),
        ({"k": kv(np.float16)}, "its k is .*'F16'"),
        ({"k": kv(np.int32)}, "its k is .*'I32'"),
        ({"k": kv()[0]}, "its k is "),
        ({"k": kv()[None]}, "its k is "),
        ({"k": np.array(1, np.float32)}, "its k is "),
        ({"k": kv()[:, :, :0]}, "its v is "),
        ({"v": kv()[:, :, :4]}, "its v is "),
        ({"v": kv()[..., :3]}, "its v is "),
        ({"k": kv()[:1], "v": kv()[:1]}, "its k is "),
        ({"k": np.empty((L, H, 2**40, 0), np.float32)}, "its k is "),
        ({"more": kv()}, "it holds .*more"),
        ({f"more{i}": kv() for i in range(100)}, "it holds "),
    ],
    ids=lambda value: "",
)
def test_odd_arrays(tmp_path, arrays, message):
    assert re.search(message, refusal(forged(tmp_path / "a", arrays)))


@pytest.mark.parametrize("name", ["token_ids", "k", "v"])
def test_an_array_that_is_not_there(tmp_path, name):
    assert "is damaged, it holds" in refusal(forged(tmp_path / "a", drop=[name]))


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan], ids=str)
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.uint16], ids=["float32", "float64", "bfloat16"])
def test_keys_and_values_are_finite(tmp_path, name, value, kind):
    """Where they are bfloat16, a file holds their bits; the largest of these that is a number is let through."""
    arrays = {"k": kv(kind), "v": kv(kind)}
    largest = np.uint16(0xFF7F) if kind == np.uint16 else np.finfo(kind).max
    arrays[name][1, 2, 3, 1] = largest
    assert getattr(read(forged(tmp_path / "a", arrays), kind), name)[1, 2, 3, 1] == largest
    bits = np.array(value, np.float32).view(np.uint32) >> 16
    arrays[name][1, 2, 3, 1] = bits if kind == np.uint16 else value
    assert "not finite" in refusal(forged(tmp_path / "a", arrays), kind=kind)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan], ids=str)
def test_scales_are_finite(tmp_path, name, value):
    """Whole numbers may be anything, and no part of them is read as a scale."""
    arrays = {"k": kv(np.int8), "v": kv(np.int8)}
    arrays[name][1, 2, 3, :D] = -1  # all bits set: NaN, were they a float32
    assert (getattr(read(forged(tmp_path / "a", arrays), np.int8), name)[1, 2, 3, :D] == -1).all()
    arrays[name][1, 2, 3, D:] = np.array([value], np.float32).view(np.int8)
    assert "not finite" in refusal(forged(tmp_path / "a", arrays), kind=np.int8)


@pytest.mark.parametrize("kind", [np.int16, np.int8, np.uint8])
def test_whole_numbers_are_no_keys_of_bfloat16(tmp_path, kind):
    assert "its k is" in refusal(forged(tmp_path / "a", {"k": kv(kind), "v": kv(kind)}), kind=np.uint16)


def test_more_positions_than_the_model_was_loaded_with(tmp_path):
    assert "load it with max_model_len=5 or more" in refusal(forged(tmp_path / "a"), max_positions=4)


# --- whatever it is

jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
metadata_changes = st.dictionaries(
    st.sampled_from(["format", "version", "first", "made_by", "crc32", "else"]),
    st.one_of(
        jsons,
        jsons.map(json.dumps),
        st.integers(-2, 10).map(str),
        st.dictionaries(st.sampled_from([*MADE_BY, "else"]), jsons, max_size=2).map(lambda c: json.dumps(MADE_BY | c)),
    ),
    max_size=2,
)
dtypes = st.sampled_from([np.float32, np.float16, np.float64, np.int32, np.int64, np.uint16, np.int8, np.bool_])
shapes = st.one_of(st.just((L, H, T, D)), st.just((8,)), st.lists(st.integers(0, 6), max_size=5))
array_changes = st.dictionaries(
    st.sampled_from(["token_ids", "k", "v", "else"]),
    st.builds(lambda dtype, shape, fill: np.full(shape, fill).astype(dtype), dtypes, shapes, st.integers(0, 12)),
    max_size=2,
)


@given(metadata=metadata_changes, arrays=array_changes, drop=st.sets(st.sampled_from(["k", "first", "crc32"])))
@settings(max_examples=examples(400))
def test_a_right_session_or_one_sentence(tmp_path_factory, metadata, arrays, drop):
    path = forged(tmp_path_factory.getbasetemp() / "any", arrays, drop if len(drop) == 1 else (), **metadata)
    check_session_or_sentence(path)


@given(data=st.data())
@settings(max_examples=examples(400))
def test_bytes_that_have_changed(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "changed"
    content = bytearray(forged(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([None, None, -1, 8, 100]))]
    assume(bytes(content) != path.read_bytes())
    path.write_bytes(content)
    check_session_or_sentence(path)


def check_session_or_sentence(path: Path) -> None:
    try:
        session = read(path)
    except CheckpointError:
        return
    assert all(type(token_id) is int and 0 <= token_id < V for token_id in session.token_ids)
    assert session.k.shape == session.v.shape == (L, H, len(session.cached_token_ids), D)
    assert (session.k.dtype, session.v.dtype) == (np.float32, np.float32)
    assert np.isfinite(session.k).all()
    assert np.isfinite(session.v).all()


# --- places


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be read (it is a FIFO, and must be a regular file)" in refusal(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is a pipe, a socket or a device"):
        checked_file(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert "cannot be read" in refusal(tmp_path / "socket")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there are no such devices")
@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/full"])
def test_a_device_is_refused(name):
    assert "cannot be read (it is a character device, and must be a regular file)" in refusal(Path(name))
    with pytest.raises(CheckpointError, match="is a pipe, a socket or a device"):
        checked_file(name)


@pytest.mark.parametrize("path", ["a\0b", "~nobody-has-this-name/a"], ids=repr)
def test_a_path_that_names_nothing(path):
    with pytest.raises(RequestError, match="which names no file"):
        checked_file(path)


def test_a_file_is_opened_once_and_read_no_further_than_it_was(tmp_path, monkeypatch):
    """That it grows after it was looked at, and that another one takes its place, changes nothing any more."""
    path, fstat, looks = forged(tmp_path / "a"), os.fstat, ["what it is", "how long it is"]

    def look_and_change(descriptor):
        status = fstat(descriptor)
        looks.pop()
        if looks:
            return status
        with path.open("ab") as file:
            file.write(b"more")
        os.replace(forged(tmp_path / "b", {"token_ids": np.array([V] * 8, np.int32)}), path)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", look_and_change)
        assert read(path).token_ids == TOKEN_IDS
    assert f"token id {V}" in refusal(path)


# --- writing


def recorded(monkeypatch, folder: Path) -> list[tuple]:
    """Will hold what is done, in order: what reaches the disk, what is renamed, and what the folder then held."""
    events, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size
        events.append(("fsync", kind))
        fsync(descriptor)

    def noted_replace(source, target):
        events.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return events


def test_the_file_and_then_its_name_reach_the_disk(tmp_path, monkeypatch):
    events = recorded(monkeypatch, tmp_path)
    write_session(tmp_path / "a", SavedSession(TOKEN_IDS, 0, kv(), kv()), MADE_BY)
    size = (tmp_path / "a").stat().st_size
    assert events == [("fsync", size), ("replace", "a"), ("fsync", "folder")]


def fail_for_folders(monkeypatch, code: int, message: str) -> None:
    fsync = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, message)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path, monkeypatch):
    """Some file systems have no such call; the file is there by then."""
    fail_for_folders(monkeypatch, errno.EINVAL, "Invalid argument")
    write_session(tmp_path / "a", SavedSession(TOKEN_IDS, 0, kv(), kv()), MADE_BY)
    assert read(tmp_path / "a").token_ids == TOKEN_IDS


def test_a_disk_that_fails_to_keep_the_name_is_an_error(tmp_path, monkeypatch):
    fail_for_folders(monkeypatch, errno.EIO, "Input/output error")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*Input/output error"):
        write_session(tmp_path / "a", SavedSession(TOKEN_IDS, 0, kv(), kv()), MADE_BY)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, name):
    path = forged(tmp_path / "a")
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*/a \(No space left on device\): make room"):
        write_session(path, SavedSession(TOKEN_IDS, 0, kv(), kv()), MADE_BY)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["a"])


@pytest.mark.skipif(sys.platform == "win32", reason="a file's size has no limit there")
def test_a_disk_that_fills_while_it_is_written(tmp_path):
    """Half of the file fits, by a limit of the system's own."""
    import resource
    import signal

    path, (soft, hard) = forged(tmp_path / "a"), resource.getrlimit(resource.RLIMIT_FSIZE)
    before, ignored = path.read_bytes(), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written to .*/a \(File too large\)"):
            write_session(path, SavedSession(TOKEN_IDS, 0, kv(), kv()), MADE_BY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["a"])


def test_threads_that_write_one_file(tmp_path):
    """The last one wins, and none sees half of another's."""
    sessions = [SavedSession(TOKEN_IDS, 0, kv(seed=i), kv(seed=i)) for i in range(8)]
    threads = [threading.Thread(target=write_session, args=(tmp_path / "a", s, MADE_BY)) for s in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert any(np.array_equal(found.k, s.k) and np.array_equal(found.v, s.v) for s in sessions)


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, ".a", "a b\n"], ids=len)
def test_any_name_that_a_file_may_have(tmp_path, name):
    write_session(tmp_path / name, SavedSession(TOKEN_IDS, 0, kv(), kv()), MADE_BY)
    assert read(tmp_path / name).token_ids == TOKEN_IDS


def test_the_file_is_plain_safetensors(tmp_path):
    write_session(tmp_path / "a", SavedSession(TOKEN_IDS, 0, kv(), kv(seed=1)), MADE_BY)
    held = load_file(tmp_path / "a")
    assert held["token_ids"].tolist() == TOKEN_IDS
    assert np.array_equal(held["v"], kv(seed=1))
