"""The pickle inside a file that torch.save wrote, read without executing it.

A pickle is a program for a small stack machine, and Python's own machine calls whatever function the program
names. This one knows only the instructions and the names that a saved state dict consists of, and calls nothing.
Everything else it refuses by name; or, in a training checkpoint, which holds much beside the weights, it puts a `Stub`
in its place. `pickletools` of the standard library splits the program into instructions.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tinygpt.regular_file import open_regular
from tinygpt.weights.containers.mapped_file import MAX_DIMENSIONS, MAX_SIZE
from tinygpt.weights.errors import CheckpointError


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


@dataclass(frozen=True, slots=True)
class Stub:
    """What a function or class would have made, had it been called: its name, and what was set on it by name."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)


def fields_of(value: Any) -> dict[str, Any]:
    """The items of a dict, or what was set on an object such as argparse's Namespace, by names that are texts."""
    fields = value.state if isinstance(value, Stub) else value
    return {name: field for name, field in fields.items() if isinstance(name, str)} if isinstance(fields, dict) else {}


def read_plain_pickle(path: Path) -> Any:
    """The one object in a file that holds nothing but a pickle. CheckpointError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return PickleReader(file, path).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


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
CALLABLE = {ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER}
ADMITTED = {*CALLABLE, *STORAGE_DTYPES}


class PickleReader:
    """Reads the pickles that follow one another in `file`; `path` is named in errors.

    has_stubs: whether what no state dict needs becomes a Stub, and is not refused. `storages` are all that were named.
    """

    def __init__(self, file: BinaryIO, path: object, has_stubs: bool = False):
        self.file = file
        self.path = path
        self.has_stubs = has_stubs
        self.storages: dict[str, Storage] = {}

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
        if not self._is_stub(self.stack[-1]):
            _expect(self.stack[-1], list)
            self.stack[-1].extend(items)

    def _update_dict(self, items: list[Any]) -> None:
        if self._is_stub(self.stack[-1]):
            return
        _expect(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if self.has_stubs and type(key) not in (str, int):
                continue  # of an optimizer's state, or a random generator's
            _expect(key, str, int)  # hashing a deep tuple can take for ever
            self.stack[-1][key] = value

    def _build(self, argument: None) -> None:
        """Keep the attributes of a Stub, and drop those of a state dict (`_metadata`: versions of modules)."""
        (state,) = self._pop(1)
        if self._is_stub(self.stack[-1]):
            if isinstance(state, dict):
                self._spend(len(state))
                self.stack[-1].state.update(fields_of(state))
        else:
            _expect(self.stack[-1], dict)

    def _is_stub(self, value: Any) -> bool:
        return self.has_stubs and type(value) is Stub

    def _global(self, module_and_name: str) -> None:
        name = Name(module_and_name.replace(" ", "."))
        if name not in ADMITTED and not self.has_stubs:
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
        if tag != "storage" or (kind not in STORAGE_DTYPES and not self.has_stubs):
            raise ValueError("a storage in a form that is not known")
        _expect(key, str)
        _expect_sizes([size])
        storage = Storage(key, STORAGE_DTYPES.get(kind, kind.name), size)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError("one storage of two dtypes or sizes")
        self.stack.append(storage)

    def _new_object(self, argument: None) -> None:
        function, _arguments = self._pop(2)
        if not (self.has_stubs and type(function) is Name):
            self._refuse("the pickle instruction NEWOBJ")
        self.stack.append(Stub(function.name))

    def _reduce(self, argument: None) -> None:
        function, arguments = self._pop(2)
        if not self._is_stub(function):
            _expect(function, Name)
        is_of_stub = type(arguments) is tuple and self._is_stub(next(iter(arguments), None))
        if self._is_stub(function) or (self.has_stubs and (is_of_stub or function not in CALLABLE)):
            self.stack.append(Stub(function.name))
            return
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
        self._spend(len(pairs))
        self.stack.append({})
        for pair in pairs:
            _expect(pair, list, tuple)
            if len(pair) != 2:
                raise ValueError(f"a key and value that are {len(pair)} things")
            self._update_dict(pair)

    def _spend(self, count: int) -> None:
        """Go through `count` elements: an honest file pushes them once for each time that they are gone through."""
        self.unused -= count
        if self.unused < 0:
            raise ValueError("one list that is given to many dictionaries")


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


# The instructions of protocol 2, which is what torch.save writes, and those of protocol 4 for plain dicts.
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"}
LITERALS |= {"SHORT_BINUNICODE"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
CONTAINERS: dict[str, Callable] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}


# Each takes the reader and the instruction's argument, None for those that have none.
INSTRUCTIONS: dict[str, Callable[[PickleReader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "FRAME": lambda reader, _: None,
    "STOP": lambda reader, _: None,
    "MARK": lambda reader, _: reader.marks.append(len(reader.stack)),
    "MEMOIZE": lambda reader, _: reader._put(len(reader.memo)),
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
    "NEWOBJ": PickleReader._new_object,
    "REDUCE": PickleReader._reduce,
}
