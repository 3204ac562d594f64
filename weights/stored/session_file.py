"""Saved sessions: the tokens of a text, and the keys and values of some of them, in one safetensors file.

`token_ids` (N,) int32; `k` and `v` (L, H, T, D), in the KV cache's type, of the T tokens from `first` on, at positions
0 to T - 1. Those of an int8 cache are (L, H, T, D + 4) int8, the last four bytes being a float32 that multiplies the
others. The metadata holds the `format` and its `version`, `first`, what the keys and values were `made_by` (JSON),
and the `crc32` of `first`, `made_by` and all three arrays.

The checksum finds damage, not intent: whoever can write the file can make it say anything. So all of it is checked but
whether the keys and values are those of the tokens, which nobody can see without computing them.
"""

import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from tinygpt.errors import CheckpointError, RequestError
from tinygpt.regular_file import open_regular
from tinygpt.weights.messages import shown
from tinygpt.weights.stored.crc32 import crc32_of
from tinygpt.weights.stored.whole_file import replace_whole

FORMAT, VERSION = "tinygpt session", "1"
NAMES = ("token_ids", "k", "v")
# The format's names for the types that keys and values have.
STORED = {"float32": "F32", "float64": "F64", "uint16": "U16", "int8": "I8"}


@dataclass(frozen=True)
class SavedSession:
    """All tokens of a session, and the keys and values of those from `first` on that have some."""

    token_ids: list[int]
    first: int
    k: np.ndarray  # (L, H, T, D), or (L, H, T, D + 4) int8
    v: np.ndarray  # as k

    @property
    def cached_token_ids(self) -> list[int]:
        return self.token_ids[self.first : self.first + self.k.shape[2]]


def checked_file(path: str | os.PathLike[str]) -> Path:
    """The path of a session's file. RequestError where `path` is no path, CheckpointError where it is no file's."""
    if not isinstance(path, (str, os.PathLike)):
        raise RequestError(f"path is {path!r} and must be a text or a Path: name a file.")
    try:
        file = Path(path).expanduser()
        mode = file.stat().st_mode
    except OSError:  # it is not there yet; or it is out of reach, and whoever opens it is told
        return file
    except (TypeError, ValueError, RuntimeError) as error:  # of bytes, with a null character, of no such user
        raise RequestError(f"path is {path!r}, which names no file ({error}): name another.") from None
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"{file} is a folder, and a session is kept in a file: name one.")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{file} is a pipe, a socket or a device, and a session is kept in a file: name one.")
    return file


def write_session(path: Path, session: SavedSession, made_by: Mapping[str, object]) -> None:
    """Write the file, whole or not at all: one that is there already stays until the new one is on the disk.

    made_by: what keys and values depend on beside the tokens; `read_session` refuses another. CheckpointError if it
    cannot be written.
    """
    arrays = {"token_ids": np.array(session.token_ids, np.int32), "k": session.k, "v": session.v}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {"format": FORMAT, "version": VERSION, "first": str(session.first), "made_by": json.dumps(made_by)}
    metadata["crc32"] = _checksum(metadata, arrays)
    try:
        replace_whole(path, save(arrays, metadata))
    except OSError as error:
        advice = "make room, or name another file" if path.parent.is_dir() else "create its folder first"
        raise CheckpointError(
            f"the session cannot be written to {path} ({error.strerror or error}): {advice}."
        ) from None


def read_session(path: Path, made_by: Mapping[str, object], none: np.ndarray, max_positions: int) -> SavedSession:
    """Read the file. CheckpointError if it is damaged, no session, or made by something else than `made_by`.

    none: the keys of no position, (L, H, 0, D), in the type that those of the file must have.
    """
    metadata, tensors = _read(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no session that tinygpt saved: name another file.")
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is in version {shown(metadata.get('version'))} of its format and this tinygpt reads version "
            f"{VERSION}: start the session again from its text."
        )
    if sorted(tensors) != sorted(NAMES):
        raise CheckpointError(f"{path} is damaged, it holds {shown(sorted(tensors))}: copy it again.")
    if metadata.get("crc32") != _checksum(metadata, {name: tensors[name]["data"] for name in NAMES}):
        raise CheckpointError(f"{path} is damaged, its data does not have the checksum in its header: copy it again.")
    ours = json.loads(json.dumps(made_by))
    _check_maker(path, metadata.get("made_by", ""), ours)
    _check_layout(path, tensors, none)
    session = SavedSession(
        _array(tensors["token_ids"], np.int32).tolist(),
        _whole_number(metadata.get("first", "")),
        _array(tensors["k"], none.dtype),
        _array(tensors["v"], none.dtype),
    )
    _check_content(path, session, ours["vocab_size"])
    if session.k.shape[2] > max_positions:
        raise CheckpointError(
            f"{path} holds keys and values of {session.k.shape[2]} positions and this model was loaded with "
            f"{max_positions}: load it with max_model_len={session.k.shape[2]} or more."
        )
    return session


def _read(path: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The metadata and, by its name, what there is of each array: `dtype`, `shape`, `data`."""
    try:
        with open_regular(path) as file:
            data = file.read(os.fstat(file.fileno()).st_size)  # of one that grows meanwhile no more
        tensors = dict(deserialize(data))  # checks the header: metadata are texts, no array leaves the file
        (header_size,) = struct.unpack_from("<Q", data)
        return json.loads(data[8 : 8 + header_size]).get("__metadata__") or {}, tensors
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}): name another file.") from None
    except MemoryError:
        raise CheckpointError(f"{path} is larger than the memory that is free: name another file.") from None
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole session file ({shown(str(error))}): copy it again.") from None


def _check_maker(path: Path, text: str, ours: dict[str, Any]) -> None:
    try:
        theirs = json.loads(text)
    except (ValueError, RecursionError):
        theirs = None
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{path} does not say which model it was saved by: start again from its text.")
    different = [
        f"{name if name in ours else shown(name)} is {shown(theirs.get(name))} there and {shown(ours.get(name))} here"
        for name in {**ours, **theirs}
        if name not in theirs or name not in ours or theirs[name] != ours[name]
    ]
    if different:
        different[5:] = [f"and {len(different) - 5} more"] if len(different) > 5 else []
        raise CheckpointError(
            f"{path} was saved by another model, or by this one with other options: {'; '.join(different)}. Load the "
            "model that it was saved by, or start the session again from its text."
        )


def _check_layout(path: Path, tensors: Mapping[str, Mapping[str, Any]], none: np.ndarray) -> None:
    """Types and shapes: what the bytes of the arrays are read as."""
    L, H, _, D = none.shape
    T = (tensors["k"]["shape"][2:3] or [0])[0]
    N = (tensors["token_ids"]["shape"] or [0])[0]
    kv_type = STORED[none.dtype.name]
    for name, wanted in {"token_ids": ("I32", [N]), "k": (kv_type, [L, H, T, D]), "v": (kv_type, [L, H, T, D])}.items():
        found = tensors[name]["dtype"], tensors[name]["shape"]
        if found != wanted:
            raise _foreign(path, f"its {name} is {shown(found)} and should be {shown(wanted)}")


def _check_content(path: Path, session: SavedSession, vocab_size: int) -> None:
    outside = next((token_id for token_id in session.token_ids if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise _foreign(path, f"it has token id {outside}, and this model has {vocab_size}")
    N, T = len(session.token_ids), session.k.shape[2]
    if not 0 <= session.first <= N - T:
        raise _foreign(path, f"it has {N} tokens, and keys and values of {T} at no place among them")
    if not (_is_finite(session.k) and _is_finite(session.v)):
        raise _foreign(path, "it has keys or values that are not finite")


def _foreign(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no session of this model, whatever it says, because {problem}: start again from its text."
    )


def _array(tensor: Mapping[str, Any], dtype: Any) -> np.ndarray:
    return np.ndarray(tensor["shape"], dtype, tensor["data"])


def _whole_number(text: str) -> int:
    """-1 where the text is none that could be a position."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype == np.uint16:  # bfloat16: the exponent of what is not finite is all ones
        return not ((array & 0x7F80) == 0x7F80).any()
    if array.dtype == np.int8:  # whole numbers and their scale
        array = np.ascontiguousarray(array[..., -4:]).view(np.float32)
    return bool(np.isfinite(array).all())


def _checksum(metadata: Mapping[str, str], arrays: Mapping[str, Any]) -> str:
    """Of `first`, `made_by` and the bytes of all arrays."""
    about = metadata.get("first", "") + metadata.get("made_by", "")
    return crc32_of([about.encode(), *(arrays[name] for name in NAMES)])
