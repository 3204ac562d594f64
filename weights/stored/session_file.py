"""Saved sessions: the tokens of a text, and the keys and values of some of them, in one safetensors file.

`token_ids` (N,) int32; `k` and `v` (L, H, T, D), in the KV cache's type, of the T tokens from `first` on, at positions
0 to T - 1. The metadata holds the `format` and its `version`, `first`, what the keys and values were `made_by` (JSON),
and the `crc32` of `first`, `made_by` and all three arrays.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tinygpt.errors import CheckpointError, RequestError

FORMAT, VERSION = "tinygpt session", "1"
NAMES = ("token_ids", "k", "v")


@dataclass(frozen=True)
class SavedSession:
    """All tokens of a session, and the keys and values of those from `first` on that have some."""

    token_ids: list[int]
    first: int
    k: np.ndarray  # (L, H, T, D)
    v: np.ndarray  # (L, H, T, D)

    @property
    def cached_token_ids(self) -> list[int]:
        return self.token_ids[self.first : self.first + self.k.shape[2]]


def checked_file(path: str | os.PathLike[str]) -> Path:
    """The path of a session's file. RequestError where `path` is no path, CheckpointError where it is a folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise RequestError(f"path is {path!r} and must be a text or a Path: name a file.")
    file = Path(path).expanduser()
    if file.is_dir():
        raise CheckpointError(f"{file} is a folder, and a session is kept in a file: name one.")
    return file


def write_session(path: Path, session: SavedSession, made_by: Mapping[str, object]) -> None:
    """Write the file, whole or not at all: one that is there already stays until the new one is complete.

    made_by: what keys and values depend on beside the tokens; `read_session` refuses another.
    """
    arrays = {"token_ids": np.array(session.token_ids, np.int32), "k": session.k, "v": session.v}
    metadata = {"format": FORMAT, "version": VERSION, "first": str(session.first), "made_by": json.dumps(made_by)}
    metadata["crc32"] = _checksum(metadata, arrays)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        save_file(arrays, partial, metadata)
        os.replace(partial, path)
    except SafetensorError as error:
        raise CheckpointError(f"the session cannot be written to {path} ({error}): name another file.") from None
    finally:
        partial.unlink(missing_ok=True)


def read_session(path: Path, made_by: Mapping[str, object], max_positions: int) -> SavedSession:
    """Read the file. CheckpointError if it is damaged, no session, or made by something else than `made_by`."""
    metadata, arrays = _read(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no session that tinygpt saved: name another file.")
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is in version {metadata.get('version')} of its format and this tinygpt reads version {VERSION}: "
            "start the session again from its text."
        )
    if metadata.get("crc32") != _checksum(metadata, arrays):
        raise CheckpointError(f"{path} is damaged, its data does not have the checksum in its header: copy it again.")
    ours = json.loads(json.dumps(made_by))
    _check_maker(path, json.loads(metadata["made_by"]), ours)
    session = SavedSession(arrays["token_ids"].tolist(), int(metadata["first"]), arrays["k"], arrays["v"])
    _check_sizes(path, session, ours)
    if session.k.shape[2] > max_positions:
        raise CheckpointError(
            f"{path} holds keys and values of {session.k.shape[2]} positions and this model was loaded with "
            f"{max_positions}: load it with max_model_len={session.k.shape[2]} or more."
        )
    return session


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    try:
        with safe_open(path, framework="numpy") as file:
            metadata, names = file.metadata() or {}, sorted(file.keys())
            if metadata.get("format") == FORMAT and names != sorted(NAMES):
                raise CheckpointError(f"{path} is damaged, it holds {', '.join(names)}: copy it again.")
            return metadata, {name: file.get_tensor(name) for name in NAMES if name in names}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}): name another file.") from None
    except (SafetensorError, TypeError) as error:  # TypeError: a type of numbers that NumPy does not have
        raise CheckpointError(f"{path} is no whole session file ({error}): copy it again.") from None


def _check_maker(path: Path, theirs: dict, ours: dict) -> None:
    different = [
        f"{name} is {theirs.get(name)} there and {ours[name]} here" for name in ours if theirs.get(name) != ours[name]
    ]
    if different:
        raise CheckpointError(
            f"{path} was saved by another model, or by this one with other options: {'; '.join(different)}. Load the "
            "model that it was saved by, or start the session again from its text."
        )


def _check_sizes(path: Path, session: SavedSession, ours: dict) -> None:
    L, H = ours["n_layer"], ours["n_head"]
    shape = (L, H, len(session.cached_token_ids), ours["n_embd"] // H)
    is_known = all(0 <= token_id < ours["vocab_size"] for token_id in session.token_ids)
    if session.k.shape != shape or session.v.shape != shape or not is_known:
        raise CheckpointError(f"{path} is no session of this model, whatever it says: start again from its text.")


def _checksum(metadata: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> str:
    checksum = zlib.crc32((metadata.get("first", "") + metadata.get("made_by", "")).encode())
    for name in NAMES:
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8), checksum)
    return f"{checksum:08x}"
