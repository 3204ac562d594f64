"""The pickle inside a pytorch_model.bin, read without executing it.

A pickle is a program for a small stack machine, and Python's own machine calls whatever function the program
names. This one knows only the instructions and the names that a saved state dict consists of, calls nothing, and
refuses everything else by name. `pickletools` of the standard library splits the program into instructions.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.mapped_file import MAX_DIMENSIONS, MAX_SIZE


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat array of `size` elements, found in the file under `key`."""

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


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that the pickle names; it is never looked up."""

    name: str


ORDERED_DICT = Name("collections.OrderedDict")
REBUILD_TENSOR = Name("torch._utils._rebuild_tensor_v2")
REBUILD_PARAMETER = Name("torch._utils._rebuild_parameter")
STORAGE_DTYPES = {
    Name("torch.FloatStorage"): "float32",
    Name("torch.HalfStorage"): "float16",
    Name("torch.BFloat16Storage"): "bfloat16",
    Name("torch.DoubleStorage"): "float64",
    Name("torch.ByteStorage"): "uint8",  # integers and booleans: mask buffers, which nobody reads
    Name("torch.BoolStorage"): "bool",
    Name("torch.CharStorage"): "int8",
    Name("torch.ShortStorage"): "int16",
    Name("torch.IntStorage"): "int32",
    Name("torch.LongStorage"): "int64",
}
# A state dict takes some fifty instructions a tensor; far more than any GPT-2 needs is an attack on memory.
MAX_INSTRUCTIONS = 1_000_000
ADMITTED = {ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER, *STORAGE_DTYPES}


class PickleReader:
    """Reads the pickles that follow one another in `file`; `path` is named in errors."""

    def __init__(self, file: BinaryIO, path: object):
        self.file = file
        self.path = path

    def read(self) -> Any:
        """The next object: dicts, lists, tuples, text, numbers and StridedViews.

        Raises CheckpointError when the pickle is damaged or holds anything that a state dict has no need of.
        """
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.unused = 0  # elements that instructions have pushed, and no call has gone through
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(self.file)):
                if count >= MAX_INSTRUCTIONS:
                    raise ValueError(f"more than {MAX_INSTRUCTIONS} instructions")
                self.unused += 1
                self._step(opcode.name, argument)
            (result,) = self.stack
        except CheckpointError:
            raise
        except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
            message = f"{self.path} holds a damaged pickle ({error}): download it again."
            raise CheckpointError(message) from error
        return result

    def _step(self, opcode: str, argument: Any) -> None:
        if opcode in LITERALS:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode])
        elif opcode in CONTAINERS:
            self.stack.append(CONTAINERS[opcode]())
        elif opcode in INSTRUCTIONS:
            INSTRUCTIONS[opcode](self, argument)
        else:
            self._refuse(f"the pickle instruction {opcode}")

    def _refuse(self, what: str) -> None:
        raise CheckpointError(
            f"{self.path} asks for {what}, which no tensor needs and which could run any program: nothing was "
            "run. If you trust the file, convert it to safetensors with the library that wrote it."
        )

    def _pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("stack underflow")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _extend_list(self, items: list[Any]) -> None:
        _expect(self.stack[-1], list)
        self.stack[-1].extend(items)

    def _update_dict(self, items: list[Any]) -> None:
        _expect(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            _expect(key, str, int)  # hashing a deep tuple can take for ever
            self.stack[-1][key] = value

    def _build(self, argument: None) -> None:
        """Drop the attributes of a state dict (`_metadata`: versions of modules)."""
        self._pop(1)
        _expect(self.stack[-1], dict)

    def _global(self, module_and_name: str) -> None:
        name = Name(module_and_name.replace(" ", "."))
        if name not in ADMITTED:
            self._refuse(repr(name.name))
        self.stack.append(name)

    def _persistent_id(self, argument: None) -> None:
        (record,) = self._pop(1)
        _expect(record, tuple)
        if len(record) == 6 and record[5] is None:  # the legacy form's view of a storage, which is none
            record = record[:5]
        if len(record) != 5:  # looked at first: unpacking takes as long as the record is
            raise ValueError("a storage in a form that is not known")
        tag, kind, key, _device, size = record
        _expect(kind, Name)
        if tag != "storage" or kind not in STORAGE_DTYPES:
            raise ValueError("a storage in a form that is not known")
        _expect(key, str)
        _expect_sizes([size])
        self.stack.append(Storage(key, STORAGE_DTYPES[kind], size))

    def _reduce(self, argument: None) -> None:
        function, arguments = self._pop(2)
        _expect(function, Name)
        _expect(arguments, tuple)
        if function == ORDERED_DICT:
            self._ordered_dict(*arguments)
        elif function == REBUILD_TENSOR:
            self.stack.append(_strided_view(*arguments))
        elif function == REBUILD_PARAMETER:
            self.stack.append(_parameter(*arguments))
        else:
            self._refuse(f"a call of {function.name!r}")

    def _ordered_dict(self, pairs: Any = ()) -> None:
        """Python 2 wrote the items as [[key, value], ...]."""
        _expect(pairs, list, tuple)
        self.unused -= len(pairs)
        if self.unused < 0:  # an honest file pushes a list's elements once for each time that they are gone through
            raise ValueError("one list that is given to many dictionaries")
        self.stack.append({})
        for pair in pairs:
            _expect(pair, list, tuple)
            if len(pair) != 2:
                raise ValueError(f"a key and value that are {len(pair)} things")
            self._update_dict(pair)


def _strided_view(storage, offset, shape, strides, _requires_grad, _hooks, _metadata=None) -> StridedView:
    _expect(storage, Storage)
    _expect(shape, tuple)
    _expect(strides, tuple)
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    _expect_sizes([offset, *shape, *strides])
    return StridedView(storage, offset, shape, strides)


def _parameter(view, _requires_grad, _hooks) -> StridedView:
    _expect(view, StridedView)
    return view


def _expect(value: Any, *types: type) -> None:
    if type(value) not in types:
        wanted = " or ".join(t.__name__ for t in types)
        raise TypeError(f"a {type(value).__name__} where a {wanted} belongs")


def _expect_sizes(values: list[Any]) -> None:
    if not all(type(value) is int and 0 <= value <= MAX_SIZE for value in values):
        raise ValueError("a size, stride or offset that is no whole number from 0 to 2^48")


# The instructions of protocol 2, which is what torch.save writes.
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
CONTAINERS: dict[str, Callable] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}


# Each takes the reader and the instruction's argument, None for those that have none.
INSTRUCTIONS: dict[str, Callable[[PickleReader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "STOP": lambda reader, _: None,
    "MARK": lambda reader, _: reader.marks.append(len(reader.stack)),
    "BINPUT": PickleReader._put,
    "LONG_BINPUT": PickleReader._put,
    "BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "LONG_BINGET": lambda reader, index: reader.stack.append(reader.memo[index]),
    "TUPLE": lambda reader, _: reader.stack.append(tuple(reader._pop_to_mark())),
    "TUPLE1": lambda reader, _: reader.stack.append(tuple(reader._pop(1))),
    "TUPLE2": lambda reader, _: reader.stack.append(tuple(reader._pop(2))),
    "TUPLE3": lambda reader, _: reader.stack.append(tuple(reader._pop(3))),
    "APPEND": lambda reader, _: reader._extend_list(reader._pop(1)),
    "APPENDS": lambda reader, _: reader._extend_list(reader._pop_to_mark()),
    "SETITEM": lambda reader, _: reader._update_dict(reader._pop(2)),
    "SETITEMS": lambda reader, _: reader._update_dict(reader._pop_to_mark()),
    "BUILD": PickleReader._build,
    "GLOBAL": PickleReader._global,
    "BINPERSID": PickleReader._persistent_id,
    "REDUCE": PickleReader._reduce,
}
