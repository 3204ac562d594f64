"""PTX as Python: a kernel is cut into straight pieces, each a function over NumPy arrays, an element for each thread.

PTX ISA 9.0: https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

import itertools
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygpt.kernels.numbers import from_bfloat16

KINDS: dict[str, Any] = {
    "pred": np.bool_,
    **dict.fromkeys(("f16", "bf16"), np.uint16),
    **dict.fromkeys(("f16x2", "bf16x2"), np.uint32),
    "f32": np.float32,
    "f64": np.float64,
}
KINDS |= {
    f"{c}{n}": np.dtype(f"{'i' if c == 's' else 'u'}{n // 8}").type for c in "bus" for n in (8, 16, 32, 64)
}
MEETINGS = ("bar", "shfl", "mma")  # instructions for which a thread waits for others


class PtxError(Exception):
    """An action that a GPU refuses, or whose result PTX does not define."""


@dataclass
class Instruction:
    op: list[str]  # ld.global.v4.u32 in its parts
    operands: list[str]
    guard: str
    text: str
    line: int  # of the kernel's source, or 0

    @property
    def is_meeting(self) -> bool:
        return self.op[0] in MEETINGS


@dataclass
class Piece:
    """Instructions without a branch but at their end, the target of that branch, and whether some threads go on."""

    instructions: list[Instruction]
    target: int | None
    falls_through: bool
    run: Any = None  # (machine, index of the threads there): those that take the branch


@dataclass
class Program:
    params: dict[str, str]  # name: kind
    shared: dict[str, int]  # name: address
    shared_bytes: int  # the launch's part lies after them
    registers: dict[str, str] = field(default_factory=dict)  # name: kind
    kept: set[str] = field(default_factory=set)  # registers that one piece writes and another reads
    least_stored: int = 2  # bytes in global memory
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    pieces: list[Piece] = field(default_factory=list)


def read_ptx(text: str) -> Program:
    text = re.sub(r"//[^\n]*", "", text)
    head, _, body = text.partition(".visible .entry ")[2].partition(")")
    pointer = r"(?:\s+\.ptr(?:\s+\.\w+)?\s+\.align\s+\d+)?"
    params = re.findall(rf"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+){pointer}\s+([\w$]+)", head)
    shared: dict[str, int | None] = {}
    end = 0
    declaration = r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?;"
    for align, kind, name, size in re.findall(declaration, text):
        item = np.dtype(KINDS[kind]).itemsize
        if not size and f"{name}[]" in text:  # as large as the launch says, and so the last
            shared[name] = None
            continue
        shared[name] = -(-end // int(align or item)) * int(align or item)
        end = shared[name] + item * int(size or 1)
    end = -(-end // 16) * 16
    places = {name: end if start is None else start for name, start in shared.items()}
    program = Program({name: kind for kind, name in params}, places, end)
    program.least_stored = 1 if re.search(r"\bst\.global\.\w8\b", text) else 2
    _cut(program, *_read_body(program, body[body.index("{") + 1 :]))
    return program


def _read_body(program: Program, body: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions, and the number of the instruction after each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = [{}]  # inline PTX has registers of its own in braces
    line = count = 0
    token = re.compile(r"\s*(?:(\{)|(\})|\.loc\s+\d+\s+(\d+)[^\n]*|([\w$]+):|([^;]*);)")
    for opened, closed, place, label, statement in (found.groups() for found in token.finditer(body)):
        if opened:
            count += 1
            scopes.append({})
        elif closed:
            scopes.pop()
            if not scopes:
                break
        elif place:
            line = int(place)
        elif label:
            labels[label] = len(instructions)
        elif (statement or "").startswith("."):
            _declare(program, statement, scopes[-1], f"@{count}" if len(scopes) > 1 else "")
        elif statement:
            instructions.append(_instruction(statement, ChainMap(*reversed(scopes)), line))
    return instructions, labels


def _declare(program: Program, text: str, scope: dict[str, str], suffix: str) -> None:
    if text.startswith(".reg"):
        _, kind, names = text.split(None, 2)
        for name in names.split(","):
            many = re.fullmatch(r"(.*)<(\d+)>", name.strip())
            for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]:
                scope[one] = one + suffix
                program.registers[one + suffix] = kind[1:]
    elif text.startswith(".local"):
        align, name, size = re.search(r"\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", text).groups()
        program.local[name] = -(-program.local_bytes // int(align)) * int(align)
        program.local_bytes = program.local[name] + int(size)


def _instruction(text: str, names: Mapping[str, str], line: int) -> Instruction:
    guard, rest = re.fullmatch(r"(@\S+)?\s*(.*)", text, re.S).groups()
    op, _, rest = rest.replace("\t", " ").partition(" ")
    parts = re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)", rest)
    operands = [
        re.sub(r"[%\w$.]+", lambda found: names.get(found[0], found[0]), part.strip()) for part in parts
    ]
    own_guard = re.sub(r"%\w+", lambda found: names.get(found[0], found[0]), guard or "")
    return Instruction(op.split("."), operands, own_guard, " ".join(text.split()), line)


def _cut(program: Program, instructions: list[Instruction], labels: dict[str, int]) -> None:
    starts = {
        0,
        *(labels[instruction.operands[0]] for instruction in instructions if instruction.op[0] == "bra"),
    }
    for i, instruction in enumerate(instructions):
        if instruction.is_meeting:
            starts |= {i, i + 1}
        if instruction.op[0] in ("bra", "ret"):
            starts.add(i + 1)
    bounds = [*sorted(start for start in starts if start < len(instructions)), len(instructions)]
    numbers = {start: number for number, start in enumerate(bounds)}
    for start, stop in itertools.pairwise(bounds):
        last = instructions[stop - 1]
        if last.op[0] == "ret" and last.guard:
            raise PtxError("a ret that some threads take")
        target = numbers[labels[last.operands[0]]] if last.op[0] == "bra" else None
        falls_through = bool(last.guard) or last.op[0] not in ("bra", "ret")
        program.pieces.append(Piece(instructions[start:stop], target, falls_through))
    writers = [_Writer(program, piece) for piece in program.pieces]
    program.kept = {name for writer in writers for name in writer.inputs}
    for piece, writer in zip(program.pieces, writers, strict=True):
        scope = {**globals(), "K": writer.constants}
        exec(compile(writer.source(), "<ptx>", "exec"), scope)
        piece.run = scope["piece"]


# Results as forms of the operands after the first, all of the instruction's last kind unless KINDS_OF says another.
FORMS = {
    "cvta": "{0}.copy()", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "mad": "{0} * {1} + {2}",
    "neg": "-{0}", "abs": "np.abs({0})", "sqrt": "np.sqrt({0})", "copysign": "np.copysign({1}, {0})",
    "not": "~{0}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "rem": "remainder({0}, {1})",
    "shl": "shifted({0}, {1}, np.left_shift)", "shr": "shifted({0}, {1}, np.right_shift)", "ex2": "exp2({0})",
    "fma": "fma_{op[1]}_{op[2]}({0}, {1}, {2})", "rcp": "reciprocal({0}, {op[1]!r})",
    "bfi": "inserted({0}, {1}, {2}, {3})",
    "selp": "np.where({2}, {0}, {1})", "shfl": "m.shuffle({op[2]!r}, {0}, {1}, {2}, {3})",
}  # fmt: skip
OF_FLOATS = {"div": "{0} / {1}", "max": "np.fmax({0}, {1})", "min": "np.fmin({0}, {1})"}
OF_INTEGERS = {"div": "quotient({0}, {1})", "max": "np.maximum({0}, {1})", "min": "np.minimum({0}, {1})"}
KINDS_OF = {("selp", 2): np.bool_, ("shl", 1): np.uint32, ("shr", 1): np.uint32}  # by operand
# Calls of the machine, by an instruction's name, or with its operands.
CALLS = {
    "bar.sync 0": "m.pass_barrier(False)",
    "bar.warp.sync -1": "m.pass_barrier(True)",
    "cp.async.bulk.prefetch.L2.global": "m.prefetch({0}, {1})",
    "cp.async.cg.shared.global": "m.copy_async({0}, {1}, {2})",
    "cp.async.commit_group": "m.commit_copies()",
    "cp.async.wait_group": "m.wait_for_copies({0})",
    "griddepcontrol.launch_dependents": "pass",
    "griddepcontrol.wait": "m.wait_for_kernel_before()",
}
# Of floats, ne is false of a NaN, and comparisons that end in u are true.
COMPARISONS = {
    "eq": "{0} == {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
}
COMPARISONS |= {"ne": "({0} < {1}) | ({0} > {1})", "equ": "~(({0} < {1}) | ({0} > {1}))", "neu": "{0} != {1}"}
COMPARISONS |= {"ltu": "~({0} >= {1})", "leu": "~({0} > {1})", "gtu": "~({0} <= {1})", "geu": "~({0} < {1})"}


class _Writer:
    """A piece as the source of a function piece(m, i) of a machine and the index of the threads that are there."""

    def __init__(self, program: Program, piece: Piece):
        self.program = program
        self.lines: list[str] = []
        self.inputs: dict[str, str] = {}  # registers that are read before they are written
        self.defined: dict[str, str] = {}
        self.constants: list[Any] = []
        self.taken = "None"
        for number, instruction in enumerate(piece.instructions):
            self.write(instruction, number)

    def source(self) -> str:
        loads = [f"{variable} = m.registers[{name!r}][i]" for name, variable in self.inputs.items()]
        kept = [(name, variable) for name, variable in self.defined.items() if name in self.program.kept]
        stores = [f"m.registers[{name!r}][i] = {variable}" for name, variable in kept]
        return "\n    ".join(["def piece(m, i):", *loads, *self.lines, *stores, f"return {self.taken}"])

    def write(self, ins: Instruction, number: int) -> None:
        if ins.op[0] == "ret":
            return
        if ins.op[0] == "bra":
            if ins.guard:
                self.taken = self.read(ins.guard[1:], np.bool_)
            return
        self.lines.append(f"m.now = {number}")
        name = ins.op[0]
        kinds = OF_FLOATS if ins.op[-1][0] == "f" else OF_INTEGERS
        form = None if "wide" in ins.op else (FORMS | kinds).get(name)
        call = CALLS.get(ins.text) or CALLS.get(".".join(ins.op))
        method = getattr(self, f"_{name}", None)
        if ins.guard or "hi" in ins.op or not (form or call or method):
            raise unknown(ins)
        if call:
            given = (self.address(o) if o[0] == "[" else self.read(o, np.uint32) for o in ins.operands)
            self.lines.append(call.format(*given))
        elif form:
            self.put(ins, form)
        else:
            method(ins)

    def constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"K[{len(self.constants) - 1}]"

    def read(self, operand: str, kind: Any) -> str:
        """Return an expression of a NumPy type."""
        if operand.startswith("!"):
            return f"~{self.read(operand[1:], kind)}"
        if operand in self.program.registers:
            variable = "r_" + re.sub(r"\W", "_", operand)
            if operand not in self.defined:
                self.inputs.setdefault(operand, variable)
            return converted(variable, KINDS[self.program.registers[operand]], kind)
        if operand.startswith("%"):
            return converted(f"m.special({operand!r}, i)", np.uint32, kind)
        address = (self.program.shared | self.program.local).get(operand)
        return self.constant(immediate(operand, kind) if address is None else kind(address))

    def set(self, operand: str, kind: Any, expression: str) -> None:
        if operand == "_":
            self.lines.append(expression)
            return
        variable = self.defined[operand] = "r_" + re.sub(r"\W", "_", operand)
        self.lines.append(
            f"{variable} = {converted(f'({expression})', kind, KINDS[self.program.registers[operand]])}"
        )

    def put(self, ins: Instruction, form: str, kind: Any = None, result: Any = None) -> None:
        kind = kind or KINDS[ins.op[-1]]
        values = [
            self.read(part, KINDS_OF.get((ins.op[0], n), kind)) for n, part in enumerate(ins.operands[1:])
        ]
        self.set(ins.operands[0].split("|")[0], result or kind, form.format(*values, op=ins.op))

    def address(self, operand: str) -> str:
        base, _, offset = operand[1:-1].partition("+")
        text = self.read(base.strip(), np.uint64)
        return f"({text} + {self.constant(np.uint64(int(offset, 0) & (1 << 64) - 1))})" if offset else text

    def _mov(self, ins):
        (to, source), kind = ins.operands, KINDS[ins.op[-1]]
        parts = parts_of(to if to.startswith("{") else source)
        part_kind = KINDS[f"u{8 * np.dtype(kind).itemsize // len(parts)}"]
        if to.startswith("{"):
            self.lines.append(f"whole = {self.read(source, kind)}")
            for n, part in enumerate(parts):
                self.set(part, part_kind, f"low_part(whole, {n}, np.{part_kind.__name__})")
        elif len(parts) > 1:
            given = ", ".join(self.read(part, part_kind) for part in parts)
            self.set(to, kind, f"joined(np.{kind.__name__}, {given})")
        else:
            self.set(to, kind, self.read(source, kind) + ".copy()")  # not a view of a register that changes

    def _mul(self, ins):  # .wide
        wide = KINDS[f"{ins.op[-1][0]}{2 * int(ins.op[-1][1:])}"]
        self.put(ins, f"{{0}}.astype(np.{wide.__name__}) * {{1}}.astype(np.{wide.__name__})", result=wide)

    def _setp(self, ins):
        _, how, kind = ins.op
        how = "neu" if how == "ne" and kind[0] != "f" else how
        self.put(ins, COMPARISONS[how], result=np.bool_)

    def _cvt(self, ins):
        to, source = ins.op[-2:]
        result, kind = KINDS[to], KINDS[source]
        rounds_to_whole = {"rni", "rzi", "rmi", "rpi"} & set(ins.op)
        if KINDS[to.removesuffix("x2")] is np.uint16 and source == "f32":
            of = "bfloat16_of" if to[0] == "b" else "float16_of"
            high = f"{of}({{0}}).astype(np.uint32) << np.uint32(16) | " if to.endswith("x2") else ""
            form = f"{high}{of}({{{len(ins.operands) - 2}}})"
        elif (to, source) == ("f32", "f16"):
            form = "{0}.view(np.float16).astype(np.float32)"
        elif source[0] == "f" and to[0] != "f" and rounds_to_whole in ({"rzi"}, {"rni"}):
            whole = "np.rint({0})" if "rni" in ins.op else "{0}"
            form = f"truncated({whole}, np.{result.__name__})"
        elif source == "bf16" or (source[0] == "f" and (to[0] != "f" or rounds_to_whole)):
            raise unknown(ins)
        else:
            form = "saturated({0})" if "sat" in ins.op else f"{{0}}.astype(np.{result.__name__})"
        self.put(ins, form, kind, result)

    def _ld(self, ins):
        kind = KINDS[ins.op[-1]]
        to = parts_of(ins.operands[0])
        if ins.op[1] == "param":
            name = ins.operands[1][1:-1]
            number = [*self.program.params].index(name)
            self.set(to[0], kind, converted(f"m.params[{number}]", KINDS[self.program.params[name]], kind))
            return
        where = f"{space_of(ins)!r}, {self.address(ins.operands[1])}"
        self.lines.append(f"loaded = m.load({where}, np.{kind.__name__}, {len(to)})")
        for n, part in enumerate(to):
            self.set(part, kind, f"loaded[{n}]")

    def _st(self, ins):
        kind = KINDS[ins.op[-1]]
        values = ", ".join(self.read(part, kind) for part in parts_of(ins.operands[1]))
        where = f"{space_of(ins)!r}, {self.address(ins.operands[0])}"
        self.lines.append(f"m.store({where}, np.{kind.__name__}, [{values}])")

    def _atom(self, ins):
        kind = KINDS[ins.op[-1]]
        to = "_" if ins.op[0] == "red" else ins.operands.pop(0)
        how = next(part for part in ins.op if part in ("add", "exch", "max", "min"))
        where = f"{space_of(ins)!r}, {self.address(ins.operands[0])}, np.{kind.__name__}"
        self.set(
            to, kind, f"m.atom({where}, {self.read(ins.operands[1], kind)}, {how!r}, {'acq_rel' in ins.op})"
        )

    _red = _atom

    def _mma(self, ins):
        kind = ins.op[-2]
        if ".".join(ins.op) != f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32":
            raise unknown(ins)
        to, *given = map(parts_of, ins.operands)
        kinds = np.uint32, np.uint32, np.float32
        a, b, c = (
            ", ".join(self.read(part, k) for part in parts) for parts, k in zip(given, kinds, strict=True)
        )
        self.lines.append(f"product = m.multiply([{a}], [{b}], [{c}], {kind!r})")
        for n, part in enumerate(to):
            self.set(part, np.float32, f"product[{n}]")


def unknown(ins: Instruction) -> PtxError:
    return PtxError(f"an instruction that is not known: {ins.text}")


def parts_of(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def space_of(ins: Instruction) -> str:
    return next(part for part in ins.op if part in ("global", "shared", "local"))


def converted(text: str, have: Any, want: Any) -> str:
    """Return an expression of another type: the same bits, the lower of them, or more by the sign of `have`."""
    have, want = np.dtype(have), np.dtype(want)
    if have == want:
        return text
    if have.itemsize == want.itemsize:
        return f"{text}.view(np.{want.name})"
    if have.kind in "iu" and want.kind in "iu":
        return f"{text}.astype(np.{want.name})"
    raise PtxError(f"{want} of a register of {have}")


def immediate(text: str, kind: Any) -> Any:
    dtype = np.dtype(kind)
    if text.startswith(("0f", "0d")):
        bits = np.array(int(text[2:], 16), np.uint32 if text[1] == "f" else np.uint64)
        if dtype.kind == "f":
            return bits.view(np.float32 if text[1] == "f" else np.float64)[()].astype(kind)
        return bits.astype(f"u{dtype.itemsize}").view(kind)[()]
    value = int(text, 0)
    if dtype.kind in "bf":
        return kind(value)
    return np.array(value & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(kind)[()]


def low_part(whole, n, half):
    bits = whole.view(f"u{whole.dtype.itemsize}")
    return (bits >> bits.dtype.type(n * 8 * np.dtype(half).itemsize)).astype(half)


def joined(kind, *parts):
    unsigned = np.dtype(f"u{np.dtype(kind).itemsize}").type
    bits = 8 * np.dtype(kind).itemsize // len(parts)
    return sum(part.astype(unsigned) << unsigned(n * bits) for n, part in enumerate(parts)).view(kind)


def shifted(value, count, how):
    """Shift by any count: past the width, all bits are the sign's or 0."""
    width = 8 * value.dtype.itemsize
    by = np.minimum(count, width - 1).astype(value.dtype)
    if how is np.right_shift and value.dtype.kind == "i":
        return value >> by
    return np.where(count < width, how(value, by), value.dtype.type(0))


def inserted(field, whole, start, length):
    """bfi: return `whole` with some bits from `start` on replaced."""
    one = field.dtype.type(1)
    mask = ((one << length) - one) << start
    return ((field << start) & mask) | (whole & ~mask)


def quotient(a, b):
    """Divide integers, rounded towards 0."""
    if np.any(b == 0):
        raise PtxError("an integer is divided by 0")
    down = a // b
    return down if a.dtype.kind == "u" else down + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def remainder(a, b):
    return a - quotient(a, b) * b


def reciprocal(a, how):
    exact = a.dtype.type(1) / a
    if how == "approx" and a.dtype == np.float64:  # the upper 20 bits of the mantissa
        return np.asarray((exact.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(np.float64))
    return exact


def exp2(a):
    """ex2.approx.ftz."""
    tiny = np.float32(2.0**-126)
    result = np.exp2(np.where(np.abs(a) < tiny, np.float32(0), a).astype(np.float64)).astype(np.float32)
    return np.where(np.abs(result) < tiny, np.float32(0), result)


def saturated(a):
    return np.where(np.isnan(a), np.float32(0), np.clip(a, np.float32(0), np.float32(1)))


def truncated(a, kind):
    """Return the integer towards 0, the nearest of the type outside of it, 0 for NaN."""
    info = np.iinfo(kind)
    value = np.trunc(a.astype(np.float64))
    value = np.where(np.isnan(value), 0.0, value)
    inside = np.clip(value, float(info.min), float(info.max) if info.bits < 64 else 2.0**63 - 1024).astype(
        kind
    )
    return np.where(value >= float(info.max), kind(info.max), inside)


def bfloat16_of(a):
    bits = np.asarray(a, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(a), np.uint16(0x7FFF), rounded)


def float16_of(a):
    with np.errstate(over="ignore"):
        return np.asarray(a, np.float16).view(np.uint16)


def two_sum(a, b):
    """Return the sum and its rounding error."""
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def to_odd(total, rest):
    """Return total + rest, rounded to the odd of two neighbors: another rounding to fewer bits is then right."""
    bits = np.asarray(total).view(np.int64)
    inexact = (rest != 0) & (bits & 1 == 0) & np.isfinite(total) & np.isfinite(rest)
    return np.where(inexact, bits + np.where((rest > 0) == (total > 0), 1, -1), bits).view(np.float64)


def _fma_f32(a, b, c):
    return to_odd(
        *two_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    )  # an exact product


def fma_rn_f32(a, b, c):
    return _fma_f32(a, b, c).astype(np.float32)


def fma_rn_bf16x2(a, b, c):
    """Of two bfloat16 in each word, if float32 has the exact results."""
    return _fma_of_halves(from_bfloat16, bfloat16_of, a, b, c)


def fma_rn_f16x2(a, b, c):
    return _fma_of_halves(lambda bits: bits.view(np.float16).astype(np.float32), float16_of, a, b, c)


def _fma_of_halves(load, store, *words):
    whole = np.uint32(0)
    for shift in (np.uint32(0), np.uint32(16)):
        exact = fma_rn_f32(*(load((word >> shift).astype(np.uint16)) for word in words))
        whole = whole | store(exact).astype(np.uint32) << shift
    return whole


def fma_rm_f32(a, b, c):
    exact = _fma_f32(a, b, c)
    nearest = exact.astype(np.float32)
    return np.where(nearest.astype(np.float64) > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def fma_rn_f64(a, b, c):
    """Boldo and Melquiond (2008): emulation of an FMA and correctly rounded sums."""
    halves = []
    for factor in (a, b):
        scaled = 134217729.0 * factor
        high = scaled - (scaled - factor)
        halves.append((high, factor - high))
    (a_high, a_low), (b_high, b_low) = halves
    product = a * b
    rest = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    u, t = two_sum(c, rest)
    v, w = two_sum(product, u)
    exact = v + to_odd(*two_sum(t, w))
    return np.where(np.isfinite(exact), exact, product + c)
