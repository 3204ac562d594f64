"""Compiled kernels of one machine in a file, for others that are the same: an image's, or a fleet's.

    a line of MAGIC, the header's length (8 bytes, little-endian) and SHA-256, the header (JSON), the kernels end to end

The header says what the kernels were compiled for, and of each its name, its length and its SHA-256. Nothing of a file
is kept before all of it has been checked, nothing is unpickled here, and a name is one of a kernel or there is no
kernel. That keeps damage and mistakes out, and nobody who means harm: kernels are machine code, so whoever reads a file
trusts who made it. From then on they are this user's own, under the user's own key.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.kernels.kernel_files import KernelFiles
from tinygpt.weights.files import open_regular

MAGIC = b"tinygpt kernel archive 1\n"
SIZE_BYTES, DIGEST_BYTES = 8, 32
MAX_HEADER, MAX_KERNELS, MAX_BYTES = 1 << 20, 2000, 256 << 20  # all dtypes together have some 30 MB
MAX_MARKS = 100  # each is a file that names every kernel
FEATURES = "list of CPU features"
NAME = re.compile(r"\w{1,100}-[0-9a-f]{32}\.kernel", re.ASCII)
MARK = re.compile(r"\w[\w.+-]{0,99}", re.ASCII)


def export_kernels(path: Path, files: KernelFiles, build: dict[str, str]) -> int:
    """Write all kernels of a build to a file that is not there yet; how many. RequestError, or OSError."""
    bodies = {name: bytes(body) for name in sorted(files.names()) if (body := files.load(name)) is not None}
    if not bodies:
        raise RequestError("there are no kernels to export: they could not be kept.")
    if strange := [name for name in bodies if not NAME.fullmatch(name)]:
        raise RequestError(f"{strange[0]} lies among the kernels and is none of tinygpt's: remove it.")
    kernels = [[name, len(body), hashlib.sha256(body).hexdigest()] for name, body in bodies.items()]
    if problem := _excess(kernels):
        raise RequestError(f"the kernels' folder {problem}: remove it, and warm up again.")
    header = json.dumps({"build": build, "marks": files.marks(), "kernels": kernels}).encode()
    length, digest = len(header).to_bytes(SIZE_BYTES, "little"), hashlib.sha256(header).digest()
    _write_whole(path, [MAGIC, length, digest, header, *bodies.values()])
    return len(bodies)


def _write_whole(path: Path, parts: list[bytes]) -> None:
    """A new file, or none."""
    try:
        file = open(path, "xb")  # noqa: SIM115, closed below
    except FileExistsError:
        raise RequestError(f"{path} is there already: give another name, or remove it.") from None
    try:
        with file:
            file.writelines(parts)
    except BaseException:  # a full disk, or Ctrl-C
        path.unlink(missing_ok=True)
        raise


def import_kernels(path: Path, files: KernelFiles, build: dict[str, str]) -> int:
    """Keep the kernels of a file as this user's own; how many. RequestError, and nothing is kept, if it is damaged or
    not of this build."""
    try:
        with open_regular(path) as file:
            marks, bodies = _read(file, build)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except _Unfit as error:
        raise RequestError(f"{path} {error}.") from None
    for name, body in bodies.items():
        files.save(name, body)
    for mark in marks:
        files.mark(mark)
    if not files.is_keeping:
        raise TinyGPTError("the kernels could not be kept, so they are compiled when they are needed.")
    return len(bodies)


class _Unfit(Exception):
    """What is the matter with a file, to go on after its name."""


def _read(file: BinaryIO, build: dict[str, str]) -> tuple[list[str], dict[str, bytes]]:
    if file.read(len(MAGIC)) != MAGIC:
        raise _Unfit("is no file of `tinygpt warmup --export`, or one of another version of tinygpt")
    size, digest = int.from_bytes(file.read(SIZE_BYTES), "little"), file.read(DIGEST_BYTES)
    text = file.read(size) if size <= MAX_HEADER else b""
    header = _parsed(text if hashlib.sha256(text).digest() == digest else b"")
    if (found := _difference(header["build"], build)) is not None:
        raise _Unfit(found)
    kernels = header["kernels"]
    if problem := _excess(kernels):
        raise _Unfit(problem)
    bodies = {}
    for name, size, digest in kernels:
        body = file.read(size)
        if hashlib.sha256(body).hexdigest() != digest:
            raise _Unfit(f"is damaged: {name} is not what was exported. Copy it again")
        bodies[name] = body
    if file.read(1):
        raise _Unfit("is damaged: there is more in it than was exported. Copy it again")
    return header["marks"], bodies


def _excess(kernels: list[list[Any]]) -> str | None:
    if len(kernels) > MAX_KERNELS or sum(size for _, size, _ in kernels) > MAX_BYTES:
        return f"has more than {MAX_KERNELS} kernels, or more than {MAX_BYTES >> 20} MB of them"
    return None


def _parsed(text: bytes) -> dict[str, Any]:
    """The header, if it is of the one form that there is."""
    try:
        header = json.loads(text)
        is_right = (
            set(header) == {"build", "marks", "kernels"}
            and isinstance(header["marks"], list)
            and isinstance(header["kernels"], list)
            and len(header["marks"]) <= MAX_MARKS
            and all(isinstance(word, str) for pair in header["build"].items() for word in pair)
            and all(isinstance(mark, str) and MARK.fullmatch(mark) for mark in header["marks"])
            and all(_is_kernel(*kernel) for kernel in header["kernels"])
            and len({name for name, *_ in header["kernels"]}) == len(header["kernels"])
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_right = False
    if not is_right:
        raise _Unfit("is damaged: its header cannot be read. Copy it again")
    return header


def _is_kernel(name: Any, size: Any, digest: Any) -> bool:
    return bool(NAME.fullmatch(name)) and type(size) is int and size >= 0 and isinstance(digest, str)


def _difference(theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """What they were compiled for that is not so here; None if all is."""
    for what in {**ours, **theirs}:
        there, here = theirs.get(what, "unknown"), ours.get(what, "unknown")
        if there != here:
            if what == FEATURES:
                there, here = _beyond(there, here), _beyond(here, there)
            return f"was made where the {what} is {there}, and here it is {here}: export one on a machine like this"
    return None


def _beyond(features: str, others: str) -> str:
    """Of a list with commas, what is not in the other."""
    others = others.split(",")
    return ",".join(feature for feature in features.split(",") if feature not in others) or "shorter"
