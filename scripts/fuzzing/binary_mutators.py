"""How safetensors files, pickles and zip archives are damaged where it hurts: inside a frame that stays whole."""

import hashlib
import io
import json
import pickletools
import struct
import zipfile
import zlib
from random import Random

from tinygpt.kernels.kernel_archive import DIGEST_BYTES, MAGIC, SIZE_BYTES

from .mutators import BYTES, INTEGERS, JSON, Mutator
from .tokenizer_seeds import prepared_digest

# --- safetensors


def _split(data: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack_from("<Q", data)
    return data[8 : 8 + size], data[8 + size :]


def _join(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def sort_header(data: bytes) -> bytes:
    """The library writes metadata in an order that is drawn anew every time."""
    header, body = _split(data)
    return _join(json.dumps(json.loads(header), sort_keys=True).encode(), body)


def edit_header(data: bytes, rng: Random) -> bytes:
    header, body = _split(data)
    return _join(rng.choice(JSON)(header, rng), body)


def edit_header_bytes(data: bytes, rng: Random) -> bytes:
    header, body = _split(data)
    return _join(rng.choice(BYTES)(header, rng), body)


def edit_body(data: bytes, rng: Random) -> bytes:
    header, body = _split(data)
    return _join(header, rng.choice(BYTES)(body, rng))


def set_header_size(data: bytes, rng: Random) -> bytes:
    size = len(_split(data)[0])
    return struct.pack("<Q", rng.choice([*INTEGERS, size - 1, size + 1, size + 8]) % 2**64) + data[8:]


def edit_tensor(data: bytes, rng: Random) -> bytes:
    """Another shape, dtype or place that may fit the bytes as well: the library has nothing to object."""
    header, body = _split(data)
    entries = json.loads(header)
    names = [name for name in entries if name != "__metadata__"]
    one, other = entries[rng.choice(names)], entries[rng.choice(names)]
    change = rng.randrange(5)
    if change == 0:
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif change == 1:
        one["shape"] = rng.choice([one["shape"][::-1], [*one["shape"], 1], [1, *one["shape"]], [0], []])
    elif change == 2:
        one["dtype"] = rng.choice(["F32", "F16", "BF16", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "C64", "X"])
    elif change == 3:
        one["data_offsets"] = [offset + rng.choice([-4, 4, 2**40]) for offset in one["data_offsets"]]
    else:
        header += b" " * rng.randrange(1, 70)
        return _join(header, body)
    return _join(json.dumps(entries).encode(), body)


def edit_metadata(data: bytes, rng: Random) -> bytes:
    """What the file says of itself, which may be JSON again."""
    header, body = _split(data)
    entries = json.loads(header)
    metadata = entries["__metadata__"]
    name = rng.choice([*metadata])
    value = metadata[name].encode()
    metadata[name] = rng.choice([*BYTES, *JSON, *JSON])(value, rng).decode("utf-8", "replace")
    return _join(json.dumps(entries).encode(), body)


def seal_packed(data: bytes, rng: Random) -> bytes:
    """The checksum of a converted checkpoint, right again."""
    header, body = _split(data)
    entries = json.loads(header)
    entries["__metadata__"]["crc32"] = f"{zlib.crc32(body):08x}"
    return _join(json.dumps(entries).encode().ljust(len(header)), body)


def seal_session(data: bytes, rng: Random) -> bytes:
    """The checksum of a session, right again."""
    header, body = _split(data)
    entries = json.loads(header)
    metadata = entries["__metadata__"]
    checksum = zlib.crc32((metadata.get("first", "") + metadata.get("made_by", "")).encode())
    for name in ("token_ids", "k", "v"):
        checksum = zlib.crc32(body[slice(*entries[name]["data_offsets"])], checksum)
    metadata["crc32"] = f"{checksum:08x}"
    return _join(json.dumps(entries).encode(), body)


def seal_archive(data: bytes, rng: Random) -> bytes:
    """The digest of exported kernels' header, right again."""
    length, start = len(MAGIC), len(MAGIC) + SIZE_BYTES + DIGEST_BYTES
    header = data[start : start + int.from_bytes(data[length:][:SIZE_BYTES], "little")]
    return data[: length + SIZE_BYTES] + hashlib.sha256(header).digest() + data[start:]


# --- a prepared tokenizer: a digest, and JSON whose arrays are spelt in hexadecimal


def edit_prepared(data: bytes, rng: Random) -> bytes:
    digest, _, payload = data.partition(b"\n")
    return digest + b"\n" + rng.choice(JSON)(payload, rng)


def edit_prepared_spec(data: bytes, rng: Random) -> bytes:
    """All but the vocabulary."""
    digest, _, payload = data.partition(b"\n")
    content = json.loads(payload)
    content["spec"] = json.loads(rng.choice(JSON)(json.dumps(content["spec"]).encode(), rng))
    return digest + b"\n" + json.dumps(content).encode()


def edit_prepared_array(data: bytes, rng: Random) -> bytes:
    """Any bytes of an array, a number that means something, or two numbers in each other's place, which may fit."""
    digest, _, payload = data.partition(b"\n")
    content = json.loads(payload)
    name = rng.choice(["ranks", "ids", "lengths", "tokens"])
    array = bytes.fromhex(content[name])
    change = rng.randrange(4)
    if change == 0:
        array = rng.choice(BYTES)(array, rng)
    else:
        numbers = [array[i : i + 4] for i in range(0, len(array), 4)]
        one, other = rng.randrange(len(numbers)), rng.randrange(len(numbers))
        meant = (rng.choice(INTEGERS) % 2**32).to_bytes(4, "little")
        numbers[one], numbers[other] = (meant, numbers[other]) if change == 1 else (numbers[other], numbers[one])
        array = b"".join(numbers)
    content[name] = array.hex()
    return digest + b"\n" + json.dumps(content).encode()


def seal_prepared(data: bytes, rng: Random) -> bytes:
    """Its digest, right again."""
    payload = data.partition(b"\n")[2]
    return prepared_digest(payload) + b"\n" + payload


# --- pickles

# Instructions that a state dict does not consist of, and what they might do.
FRAGMENTS = [
    b"cos\nsystem\nX\x0c\0\0\0touch canaryq\x01\x85R",
    b"cbuiltins\neval\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n)R",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8a\x09" + b"\xff" * 8 + b"\0",
    *(bytes([code]) for code in b"(.012NRQ)]}abdehijloqrstu\x81\x85\x86\x87\x88\x89\x8a\x93\x94\x95\x97"),
    *(b"h" + bytes([index]) for index in (0, 1, 2, 5, 255)),
    b"K\x05",
    b"J\xff\xff\xff\xff",
    b"X\x01\0\0\0a",
]


def _instructions(data: bytes) -> list[bytes]:
    places = [place for _, _, place in pickletools.genops(data)]
    return [data[start:stop] for start, stop in zip(places, [*places[1:], len(data)], strict=True)]


def edit_instructions(data: bytes, rng: Random) -> bytes:
    ops = _instructions(data)
    place, other = rng.randrange(len(ops)), rng.randrange(len(ops))
    change = rng.randrange(6)
    if change == 0:
        del ops[place : place + rng.choice([1, 1, 2, 5])]
    elif change == 1:
        ops[place:place] = ops[other : other + rng.choice([1, 2, 8])] * rng.choice([1, 1, 2, 100, 5000])
    elif change == 2:
        ops[place], ops[other] = ops[other], ops[place]
    elif change == 3:
        ops.insert(place, rng.choice(FRAGMENTS))
    elif change == 4:  # many of one thing: dimensions, or references to what is there
        many = rng.choice([rng.choice(ops), b"h" + bytes([rng.randrange(20)]), b"K\x01"])[:20]
        ops[place] = b"(" + many * rng.choice([10, 1000, 300_000]) + rng.choice([b"t", b"l", b"t\x85"])
    else:
        ops[place] = rng.choice(FRAGMENTS)
    return b"".join(ops)


def edit_argument(data: bytes, rng: Random) -> bytes:
    """A number or a text in the pickle becomes another, its frame stays."""
    ops = _instructions(data)
    place = rng.choice([i for i, op in enumerate(ops) if op[:1] in b"KMJ\x8aXhqrjc"])
    op = ops[place]
    if op[:1] in b"KMJ\x8a":
        value = rng.choice(INTEGERS)
        size = value.bit_length() // 8 + 1
        ops[place] = b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
    elif op[:1] == b"X":
        text = rng.choice([rng.choice(BYTES)(op[5:], rng), b"", b"0", b"../canary", b"storage"])
        ops[place] = b"X" + struct.pack("<I", len(text)) + text
    elif op[:1] == b"c":
        ops[place] = rng.choice([rng.choice(BYTES)(op, rng), *FRAGMENTS[:4], op.replace(b"Float", b"Long")])
    else:
        ops[place] = op[:1] + bytes([rng.choice([0, 1, 2, 3, 255, (op[1] + 1) % 256])]) + op[2:]
    return b"".join(ops)


PICKLE: list[Mutator] = [edit_instructions, edit_argument, edit_argument]


def edit_legacy(data: bytes, rng: Random) -> bytes:
    """One of the five pickles of a file from before torch 1.6, or what follows them."""
    parts, rest = [], io.BytesIO(data)
    for _ in range(5):
        start = rest.tell()
        for _ in pickletools.genops(rest):
            pass
        parts.append(data[start : rest.tell()])
    parts.append(rest.read())
    place = rng.choice([0, 1, 2, 3, 3, 3, 3, 4, 4, 5, 5])
    parts[place] = rng.choice(BYTES if place == 5 else PICKLE)(parts[place], rng)
    return b"".join(parts)


# --- zip archives

# Fields of a local header, a directory entry and the end of the directory: signature, then (place, size) of each.
ZIP_FIELDS = {
    b"PK\x03\x04": [(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)],
    b"PK\x01\x02": [(8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (38, 4), (42, 4)],
    b"PK\x05\x06": [(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)],
}


def set_zip_field(data: bytes, rng: Random) -> bytes:
    signature = rng.choice([*ZIP_FIELDS])
    starts = [i for i in range(len(data)) if data.startswith(signature, i)]
    start, (place, size) = rng.choice(starts), rng.choice(ZIP_FIELDS[signature])
    old = int.from_bytes(data[start + place : start + place + size], "little")
    new = rng.choice([*INTEGERS, old + 1, old - 1, old * 2, len(data), len(data) - old]) % 256**size
    return data[: start + place] + new.to_bytes(size, "little") + data[start + place + size :]


def edit_entry(data: bytes, rng: Random) -> bytes:
    """The content of one entry; its lengths and checksum are right."""
    entries = _entries(data)
    name = rng.choice([*entries, *[name for name in entries if name.endswith(".pkl")] * 5])
    entries[name] = rng.choice(PICKLE if name.endswith(".pkl") else BYTES)(entries[name], rng)
    return _zip(entries.items())


def edit_entries(data: bytes, rng: Random) -> bytes:
    """An entry is lost, renamed, there twice, new or compressed."""
    entries = [*_entries(data).items()]
    place = rng.randrange(len(entries))
    name, content = entries[place]
    folder = name.partition("/")[0]
    change = rng.randrange(5)
    if change == 0:
        del entries[place]
    elif change == 1:
        other = rng.choice([name for name, _ in entries])
        entries[place] = (
            rng.choice([other, f"{folder}/../canary", "/etc/passwd", f"{folder}/data/0/", "é\0x"]),
            content,
        )
    elif change == 2:
        entries.append((name, rng.choice([content, b"", b"x" * 100])))
    elif change == 3:
        entries.append((f"{folder}/{rng.choice(['byteorder', 'data.pkl', 'data/7', 'x'])}", rng.choice([b"big", b"x"])))
    else:
        return _zip(entries, rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]))
    return _zip(entries)


def _entries(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def _zip(entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


SAFETENSORS = [edit_header, edit_header, edit_header_bytes, edit_body, set_header_size, edit_tensor, edit_tensor]
STORED = [*SAFETENSORS, edit_metadata, edit_metadata]
ZIP = [set_zip_field, set_zip_field, edit_entry, edit_entries]
TORCH = [*ZIP, edit_entry, edit_entry, edit_entry, edit_entry]
LEGACY = [edit_legacy]
PREPARED = [edit_prepared, edit_prepared_spec, edit_prepared_spec, edit_prepared_array, edit_prepared_array]
