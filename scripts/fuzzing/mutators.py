"""How texts and bytes are damaged: functions from bytes to bytes, which draw whatever they need from `rng`.

One that finds nothing to damage raises an error, whichever comes, and is passed over.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

Mutator = Callable[[bytes, Random], bytes]

INTEGERS = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 4096, 65535, 65536, 10**6, 2**48, 10**18]
INTEGERS += [2**bits + change for bits in (31, 32, 63, 64) for change in (-1, 0, 1)]
INTEGERS += [-1, -(2**31), -(2**63)]
SLOW = r"(\w+\.?)+!"  # an expression that takes for ever to match a long name
DEEP = "@deep@"  # stands for a value that json.dumps could not write
VALUES: list[Any] = [
    None,
    True,
    False,
    "",
    "a",
    "\0",
    "\ud800",
    "../canary",
    "../../canary",
    "/etc/passwd",
    "*",
    "é" * 300,
    SLOW,
]
VALUES += [*INTEGERS, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), [], {}, [[]], [None], {"a": {}}, DEEP]
LINES = [
    b"",
    b" ",
    b"a b",
    b"a b c",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"#version: 0.2",
    b"x" * 100_000,
    b"\0",
    "Ġ Ġ".encode(),
]


# --- any bytes


def flip_bits(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def set_bytes(data: bytes, rng: Random) -> bytes:
    place, count = rng.randrange(len(data)), rng.choice([1, 1, 2, 4, 16])
    return data[:place] + rng.choice([rng.randbytes(count), bytes(count), b"\xff" * count]) + data[place + count :]


def set_integer(data: bytes, rng: Random) -> bytes:
    """An integer that means something, in binary."""
    size = rng.choice([1, 2, 4, 8])
    value = (rng.choice(INTEGERS) % 256**size).to_bytes(size, rng.choice(["little", "little", "big"]))
    place = rng.randrange(len(data))
    return data[:place] + value + data[place + size :]


def set_number(data: bytes, rng: Random) -> bytes:
    """A number that is spelt out becomes another one."""
    starts = [i for i in range(len(data)) if data[i : i + 1].isdigit() and not data[i - 1 : i].isdigit()]
    start = stop = rng.choice(starts)
    while data[stop : stop + 1].isdigit():
        stop += 1
    other = rng.choice(
        [str(rng.choice(INTEGERS)), str(int(data[start:stop]) + rng.choice([-1, 1])), "9" * 5000, "1e999"]
    )
    return data[:start] + other.encode() + data[stop:]


def truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.choice([rng.randrange(len(data)), max(len(data) - rng.randrange(1, 64), 0)])]


def cut(data: bytes, rng: Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.choice([1, 2, 8, 64, rng.randrange(1, 1 + len(data))]) :]


def insert(data: bytes, rng: Random) -> bytes:
    place, count = rng.randrange(len(data) + 1), rng.choice([1, 1, 4, 64, 5000])
    return data[:place] + rng.choice([rng.randbytes(count), bytes(count), data[:count]]) + data[place:]


def splice(data: bytes, rng: Random) -> bytes:
    """A piece of the file over another one."""
    source, target, count = rng.randrange(len(data)), rng.randrange(len(data)), rng.choice([1, 4, 8, 32, 256])
    piece = data[source : source + count]
    return data[:target] + piece + data[target + len(piece) :]


def repeat(data: bytes, rng: Random) -> bytes:
    place, count = rng.randrange(len(data)), rng.choice([1, 4, 16, 100])
    return data[:place] + data[place : place + count] * rng.choice([2, 3, 100, 1000]) + data[place + count :]


# --- JSON


def set_json_value(data: bytes, rng: Random) -> bytes:
    return _edit(data, rng, lambda node, key: node.__setitem__(key, rng.choice(VALUES)))


def nudge_json_value(data: bytes, rng: Random) -> bytes:
    """Something near the value that is there."""

    def near(value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return not value
        if isinstance(value, (int, float)):
            return rng.choice([value + 1, value - 1, -value, value * 2, float(value), str(value), [value]])
        if isinstance(value, str):
            place = rng.randrange(len(value) + 1)
            return rng.choice(
                [value[:place], value[:place] + chr(rng.randrange(1, 300)) + value[place:], [value], value * 50]
            )
        return rng.choice([[value], str(value), len(value)])

    return _edit(data, rng, lambda node, key: node.__setitem__(key, near(node[key])))


def drop_json_value(data: bytes, rng: Random) -> bytes:
    return _edit(data, rng, lambda node, key: node.__delitem__(key))


def rename_json_key(data: bytes, rng: Random) -> bytes:
    def rename(node: Any, key: Any) -> None:
        node[rng.choice([*node, "", "\ud800", "x", SLOW, key + ".x", "__metadata__", "transformer." + key])] = node.pop(
            key
        )

    return _edit(data, rng, rename)


def swap_json_values(data: bytes, rng: Random) -> bytes:
    def swap(node: Any, key: Any) -> None:
        other = rng.choice([*node] if isinstance(node, dict) else range(len(node)))
        node[key], node[other] = node[other], node[key]

    return _edit(data, rng, swap)


def repeat_json_key(data: bytes, rng: Random) -> bytes:
    """One key twice in the outermost object: readers differ in which of them they believe."""
    fields = json.loads(data)
    pair = json.dumps({rng.choice([*fields]): rng.choice([*VALUES, *fields.values()])})
    return b"{" + pair[1:-1].encode() + b"," + data.lstrip()[1:]


def _edit(data: bytes, rng: Random, change: Callable[[Any, Any], None]) -> bytes:
    """Change one place of the tree, drawn level by level, so that outer fields are hit as often as inner ones."""
    root = {"": json.loads(data)}
    node, key = root, ""
    while isinstance(node[key], (dict, list)) and node[key] and (node is root or rng.random() < 0.7):
        node = node[key]
        key = rng.choice([*node] if isinstance(node, dict) else range(len(node)))
    change(node, key)
    text = json.dumps(root[""], ensure_ascii=rng.random() < 0.5)
    nested = rng.choice(["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 300 + "1" + "}" * 300])
    return text.replace(f'"{DEEP}"', nested).encode("utf-8", "surrogatepass")


# --- lines


def edit_lines(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    change = rng.randrange(6)
    if change == 0:
        lines[place] = rng.choice(LINES)
    elif change == 1:
        lines.insert(place, lines[other])
    elif change == 2:
        lines[place], lines[other] = lines[other], lines[place]
    elif change == 3:
        lines[place] = lines[place] + lines.pop(other)
    elif change == 4:
        del lines[place]
    else:
        return rng.choice([b"\r\n", b"\r", b"\n\n", b"\x85"]).join(lines)
    return b"\n".join(lines)


def edit_json_line(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    lines[place] = rng.choice(JSON)(lines[place], rng)
    return b"\n".join(lines)


BYTES = [flip_bits, set_bytes, set_integer, set_number, truncate, cut, insert, splice, repeat]
JSON = [set_json_value, nudge_json_value, drop_json_value, rename_json_key, swap_json_values, repeat_json_key]
LINE = [edit_lines]
JSON_LINES = [edit_lines, edit_json_line, edit_json_line, edit_json_line]
