"""Pickles of torch.save, read without torch.

A pickle can name any function for Python to call. Here the names are a closed list; others are refused, or become
Stubs in a training checkpoint. No code of a file runs.
"""

import io
import pickle
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import CheckpointError
from .mapped_file import MappedFile, is_possible_shape, parsing

STORAGE_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "ByteStorage": "uint8",  # integers and booleans are masks, which are never read
    "BoolStorage": "bool",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
}
MAX_STUBS, MAX_NAME = 10_000, 100  # classes, characters of a name
MAX_INSTRUCTIONS = 1_000_000  # a tensor takes some fifty


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat array of `size` elements, under `key` in the file."""

    key: str
    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class StridedView:
    """A tensor: `shape` and `strides`, in elements, over `storage` from element `offset` on."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Stub:
    """An object of a class that is not on the list: its name and attributes."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Stub":
        stub = object.__new__(cls)
        stub.state = {}
        return stub

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __call__(self, *args: Any) -> "Stub":
        return type(self)()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state = fields_of(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...


class CheckedDict(dict):
    """A dictionary without attributes (a state dict's `_metadata`), whose keys are names.

    Others are left out, or refused if it is strict: to hash nested tuples or colliding ints takes for ever.
    """

    def __init__(self, is_strict: bool):
        self.is_strict = is_strict

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is str or (type(key) is int and abs(key) < 2**31):
            super().__setitem__(key, value)
        elif self.is_strict:
            raise ValueError("a key of a dictionary that is no string")

    def __setstate__(self, state: Any) -> None: ...


class TorchUnpickler(pickle._Unpickler):
    """Python's own unpickler in Python, whose instructions can be overridden. has_stubs: other names become Stubs."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, program: bytes, path: Path, has_stubs: bool, pushed: int):
        super().__init__(io.BytesIO(program), encoding="latin1")
        self.path, self.has_stubs = path, has_stubs
        self.storages: dict[str, Storage] = {}
        self._stubs: dict[str, type[Stub]] = {}
        self._unspent = pushed  # instructions: an honest file takes one for each item of a dictionary
        self._allowed = {
            "collections.OrderedDict": self._checked_dict,
            "torch._utils._rebuild_tensor_v2": self._strided_view,
            "torch._utils._rebuild_parameter": lambda view, _requires_grad, _hooks: view,
            **{f"torch.{storage}": dtype for storage, dtype in STORAGE_DTYPES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in self._allowed:
            return self._allowed[full_name]
        if self.has_stubs and len(self._stubs) < MAX_STUBS:
            return self._stubs.setdefault(full_name, type("Stub", (Stub,), {"name": full_name[-MAX_NAME:]}))
        raise CheckpointError(
            f"{self.path} asks for {full_name!r}, which no tensor needs and which could run any program: nothing was "
            "run. If you trust the file, convert it to safetensors with the library that wrote it."
        )

    def persistent_load(self, record: Any) -> Storage:
        match record:  # None: the legacy form's view of a storage
            case ("storage", kind, str(key), _, size) | ("storage", kind, str(key), _, size, None):
                storage = Storage(key, kind if isinstance(kind, str) else getattr(kind, "name", ""), size)
                if is_possible_shape([size]) and self.storages.setdefault(key, storage) == storage:
                    return storage
        raise ValueError("a storage in a form that is not known, or of two dtypes or sizes")

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], Stub | CheckedDict):  # a checked view would take other numbers
            raise ValueError("attributes for an object that has none")
        super().load_build()

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(self._checked_dict(zip(items[::2], items[1::2], strict=True)))

    dispatch |= {pickle.BUILD[0]: load_build, pickle.DICT[0]: load_dict}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(self._checked_dict())

    def _checked_dict(self, pairs: Iterable[Any] = ()) -> CheckedDict:
        found = CheckedDict(is_strict=not self.has_stubs)
        for key, value in pairs:
            found[key] = value
            self._unspent -= 1
            if self._unspent < 0:
                raise ValueError("one list that is given to many dictionaries")
        return found

    def _strided_view(self, storage, offset, shape, strides, _requires_grad, _hooks, _metadata=None) -> Any:
        if isinstance(storage, Stub):
            return storage
        if type(storage) is not Storage or type(shape) is not tuple or type(strides) is not tuple:
            raise ValueError("a tensor without a storage, sizes and strides")
        if len(shape) != len(strides) or not all(map(is_possible_shape, ([offset], shape, strides))):
            raise ValueError(
                f"a tensor of an impossible shape, {len(shape)} sizes and {len(strides)} strides"
            )
        return StridedView(storage, offset, shape, strides)


def load_pickle(file: Any, path: Path, has_stubs: bool) -> tuple[Any, dict[str, Storage]]:
    """Return the next object in `file`, and the storages that it names. Raise CheckpointError if it is damaged."""
    start = file.tell()
    with parsing(path, "pickle", Exception):  # any instruction may meet an object that it was not made for
        # Before any is executed: Python allocates the memory that an instruction claims.
        for pushed, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if pushed >= MAX_INSTRUCTIONS or (
                opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > MAX_INSTRUCTIONS
            ):
                raise ValueError(f"more than {MAX_INSTRUCTIONS} instructions")
            if opcode.name in ("EMPTY_SET", "FROZENSET"):
                raise ValueError("a set, which no state dict has")
        stop = file.tell()
        file.seek(start)
        unpickler = TorchUnpickler(file.read(stop - start), path, has_stubs, pushed)
        return unpickler.load(), unpickler.storages


def read_plain_pickle(path: Path) -> Any:
    """Return the object in a file that is a pickle alone. Raise CheckpointError if it cannot be read."""
    return load_pickle(MappedFile(path).data, path, has_stubs=False)[0]


def fields_of(value: Any) -> dict[str, Any]:
    """Return the items of a dict, or an object's attributes (argparse's Namespace), whose names are texts."""
    fields = value.state if isinstance(value, Stub) else value
    return (
        {name: field for name, field in fields.items() if isinstance(name, str)}
        if isinstance(fields, dict)
        else {}
    )
