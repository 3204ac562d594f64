"""Damaged and hostile weight files: each is refused with a sentence, and nothing in them ever runs."""

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from support.foreign import gguf, nanogpt_state
from support.megatron_writer import megatron
from support.recorded import MISSING
from support.tables import rows
from support.tiny_checkpoint import (
    assert_holds,
    assert_refused,
    random_tensors,
    write_checkpoint,
    write_config,
    write_json,
)
from support.torch_files import ORDERED_DICT, STORAGE, TENSOR, own_bytes, program, text, torch_bytes
from tinygpt.cli import main as cli
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.safetensors import read_safetensors
from tinygpt.weights.containers.torch import read_torch
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors()


def refuse(path, match=""):
    """The sentence with which a file is refused, always naming the file."""
    read = read_safetensors if path.suffix == ".safetensors" else read_torch
    with pytest.raises(CheckpointError, match=match) as error:
        read(path)
    assert str(path) in str(error.value)
    return str(error.value)


def safetensors_bytes(header, data=b"\0" * 64, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(start, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


WHOLE = safetensors_bytes({"a": entry(0, 16), "b": entry(16, 64, (3, 4))})
DAMAGED_SAFETENSORS = {
    "nothing after the length": WHOLE[:8],
    "header cut": WHOLE[:30],
    "data cut": WHOLE[:-1],
    "data too long": WHOLE + b"x",
    "length beyond the file": safetensors_bytes({"a": entry(0, 64, (16,))}, size=10**6),
    "length 2**64 - 1": safetensors_bytes({"a": entry(0, 64, (16,))}, size=2**64 - 1),
    "not JSON": safetensors_bytes(b"{'a': 1}"),
    "deep JSON": safetensors_bytes(b'{"a":' * 10_000),
}
F32 = {"dtype": "F32"}
# Tensors of a file with 64 bytes.
HEADERS = """
overlap | {"a": {"shape": [8], "data_offsets": [0, 32]}, "b": {"shape": [12], "data_offsets": [16, 64]}}
hole | {"a": {"shape": [4], "data_offsets": [0, 16]}, "b": {"shape": [8], "data_offsets": [32, 64]}}
offsets beyond the file | {"a": {"shape": [32], "data_offsets": [0, 128]}}
shape larger than the bytes | {"a": {"shape": [32], "data_offsets": [0, 64]}}
shape that overflows | {"a": {"shape": [4611686018427387904, 4611686018427387904], "data_offsets": [0, 64]}}
"""
for each, header in rows(HEADERS):
    DAMAGED_SAFETENSORS[each] = safetensors_bytes({name: F32 | place for name, place in header.items()})


@pytest.mark.parametrize("name", DAMAGED_SAFETENSORS)
def test_damaged_safetensors(tmp_path, name):
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED_SAFETENSORS[name])
    refuse(path, "a damaged safetensors file")


def test_the_undamaged_file_of_these_tests_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    assert {name: tensor.shape for name, tensor in read_safetensors(path).tensors.items()} == {
        "a": (4,),
        "b": (3, 4),
    }


def test_sizes_in_config_json_that_lie_allocate_nothing(tmp_path):
    for field in ("n_embd", "n_inner", "vocab_size", "n_positions"):
        assert_refused(write_checkpoint(tmp_path, **{field: 2**31 - 2}), r"config\.json asks for")


def need_torch():
    return pytest.importorskip("torch", reason=MISSING)


def saved_by_torch(make, **options):
    """What torch itself writes of make(torch), which nothing else can write."""
    torch, buffer = need_torch(), io.BytesIO()
    torch.save(make(torch), buffer, **options)
    return buffer.getvalue()


ZIP = torch_bytes(TENSORS)
LEGACY = torch_bytes(TENSORS, is_legacy=True)


def rewrite_zip(data=ZIP, compression=zipfile.ZIP_STORED, **changes):
    """The archive with entries replaced, dropped (None) or added; `data__0` stands for data/0."""
    changes = {name.replace("__", "/").replace("_pkl", ".pkl"): value for name, value in changes.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        entries = {info.filename.partition("/")[2]: old.read(info) for info in old.infolist()}
        for name, content in (entries | changes).items():
            if content is not None:
                new.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def write_bin(folder, data):
    path = folder / "pytorch_model.bin"
    path.write_bytes(data)
    return path


class Call:
    def __init__(self, function, *arguments):
        self.function = function
        self.arguments = arguments

    def __reduce__(self):
        return self.function, self.arguments


# Each leaves a file named "witness" in the current folder, if it ever runs.
CALLS = {
    "system": Call(os.system, "touch witness"),
    "eval": Call(eval, "open('witness', 'w')"),
    "exec": Call(exec, "open('witness', 'w')"),
    "open": Call(io.open, "witness", "w"),
    "getattr": Call(Path.touch, Path("witness")),  # pickled as getattr(Path, "touch")
    "numpy": Call(np.save, "witness", 1),
    "harmless": Call(collections.Counter, "a"),
}


@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("call", [*CALLS, "torch"])
def test_a_pickle_that_calls_anything_is_refused_and_nothing_runs(tmp_path, monkeypatch, call, form):
    monkeypatch.chdir(tmp_path)
    made = Call(need_torch().save, 1, "witness") if call == "torch" else CALLS[call]
    hostile = pickle.dumps({"transformer.wte.weight": made}, protocol=2)
    data = rewrite_zip(data_pkl=hostile) if form == "zip" else b"".join([*legacy_head(), hostile])
    assert "asks for '" in refuse(write_bin(tmp_path, data), "nothing was run")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def legacy_head():
    return [
        pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    ]


HOSTILE_PROGRAMS = {
    # Names that are admitted, used for what they are not for.
    "call of a storage class": b"ctorch\nFloatStorage\n)R",
    "OrderedDict of text": ORDERED_DICT + text("ab") + b"\x85R",
    "tensor of text": TENSOR + b"(" + text("s") + b"K\x00))\x89}tR",
    "tensor with negative offset": TENSOR + b"(" + STORAGE + b"J\xff\xff\xff\xffK\x04\x85K\x01\x85\x89}tR",
    "tensor with a bool in its shape": TENSOR + b"(" + STORAGE + b"K\x00\x88\x85K\x01\x85\x89}tR",
    "tensor with strides missing": TENSOR + b"(" + STORAGE + b"K\x00K\x02K\x02\x86K\x01\x85\x89}tR",
    # Attributes set, keys that are no names, and other instructions.
    "attributes of a name": ORDERED_DICT + b"}" + text("__init__") + text("x") + b"sb",
    "a tuple as a key": b"})K\x01s",
    "an odd number of items": b"}(" + text("a") + b"u",
    "NEWOBJ": ORDERED_DICT + b")\x81",
    "INST": b"(iposix\nsystem\n",
    "STACK_GLOBAL": text("os") + text("system") + b"\x93",
    # Storages.
    "persistent id of text": text("0") + b"Q",
    "persistent id too short": b"(" + text("storage") + b"tQ",
    "a view of a storage": STORAGE.replace(b"tQ", b"(K\x01K\x01ttQ"),
    # Damage.
    # To hash nested tuples takes for ever: a key of 2**60 nodes, keys, a set.
    "a key of many tuples": b"})" + b"2\x86" * 60 + b"Ns",
    "keys of many tuples": b"}()" + b"2\x86" * 60 + b"Nu",
    "a set of many tuples": b"\x8f()" + b"2\x86" * 60 + b"\x90",
    "attributes of a function": TENSOR + b"}b",
    "no mark": b"t",
    "an instruction that does not exist": b"\xff",
    "text cut short": b"X\xff\xff\xff\x7fabc",
}


@pytest.mark.parametrize("case", HOSTILE_PROGRAMS)
def test_a_pickle_that_means_no_state_dict(tmp_path, case):
    path = write_bin(tmp_path, rewrite_zip(data_pkl=program(HOSTILE_PROGRAMS[case])))
    refuse(path, "is a damaged pickle|asks for|must hold a state dict")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x80\x02N", "damaged pickle"),
        (program(b"N" * 2_000_000), "more than 1000000"),
        (
            program(b"Nr" + struct.pack("<I", 2**31)),
            "more than 1000000",
        ),  # remembers an object under that number
    ],
    ids=["without end", "only grows", "claims memory"],
)
def test_a_pickle_is_no_longer_than_it_needs_to_be(tmp_path, data, sentence):
    refuse(write_bin(tmp_path, rewrite_zip(data_pkl=data)), sentence)


def view(offset=0, shape=(4,), strides=(1,)):
    """A state dict of one view of a storage of 4 elements, as its own pickle."""
    numbers = [pickle.dumps(value, protocol=2)[2:-1] for value in (offset, shape, strides)]
    # dumps remembers tuples under numbers: harmless, nothing here asks for them
    tensor = TENSOR + b"(" + STORAGE + b"".join(numbers) + b"\x89}tR"
    return program(b"}" + text("a") + tensor + b"s")


OUTSIDE = rows("""
1 | [4] | [1]
0 | [5] | [1]
0 | [4] | [2]
0 | [2, 2] | [3, 1]
1000000000000000000000000000000 | [1] | [1]
0 | [4611686018427387904, 4611686018427387904] | [1, 1]
0 | [1000000000] | [0]
4 | [1] | [1]
5 | [0] | [1]
""")


@pytest.mark.parametrize(("offset", "shape", "strides"), OUTSIDE)
def test_a_view_that_reaches_outside_its_storage(tmp_path, offset, shape, strides):
    whole = rewrite_zip(torch_bytes({"a": np.arange(4, dtype=np.float32)}), data_pkl=view())
    assert read_torch(write_bin(tmp_path, whole)).tensors["a"].float32().tolist() == [0, 1, 2, 3]
    outside = rewrite_zip(whole, data_pkl=view(offset, tuple(shape), tuple(strides)))
    refuse(write_bin(tmp_path, outside), "truncated or damaged|an impossible shape")


BAD = {
    "an entry outside": (lambda: moved(ZIP, 2**31), "damaged zip archive"),
    "compressed": (
        lambda: rewrite_zip(compression=zipfile.ZIP_DEFLATED),
        "compressed, encrypted or repeated",
    ),
    "encrypted": (lambda: flagged(ZIP, 0, 1), "compressed, encrypted or repeated"),
    "an entry twice": (lambda: repeated(ZIP), "compressed, encrypted or repeated"),
    "no data.pkl": (lambda: rewrite_zip(data_pkl=None), r"without data\.pkl"),
    "no storage": (lambda: rewrite_zip(data__0=None), "holds 0 bytes for the storage"),
    "a storage cut": (lambda: rewrite_zip(data__0=b"\0" * 12), "holds 12 bytes for the storage"),
    "big-endian": (lambda: rewrite_zip(byteorder=b"big"), "big-endian"),
    "end cut": (lambda: ZIP[:-30], "damaged zip archive"),
    "data.pkl cut": (lambda: rewrite_zip(data_pkl=pickle_of(ZIP)[:-40]), "damaged pickle"),
    "a list": (lambda: torch_bytes([np.zeros(1, np.float32)]), "holds a list"),
    "a wrapped state dict": (
        lambda: torch_bytes({"state_dict": TENSORS, "epoch": 3}),
        "under: state_dict, epoch",
    ),
    "a whole model": (
        lambda: saved_by_torch(lambda torch: torch.nn.Linear(2, 2)),
        r"'torch\.nn\..*\.Linear'",
    ),
    "NumPy arrays": (lambda: saved_by_torch(lambda torch: {"a": np.zeros(2)}), r"asks for 'numpy"),
}


def pickle_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def flagged(data, byte, bits):
    """The archive with bits of the flags set on every entry of its directory."""
    data = bytearray(data)
    place = data.find(b"PK\x01\x02")
    while place >= 0:
        data[place + 8 + byte] |= bits
        place = data.find(b"PK\x01\x02", place + 4)
    return bytes(data)


def moved(data, distance):
    """The archive whose directory says that the last storage lies further on."""
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/")) + 42
    (offset,) = struct.unpack_from("<I", data, place)
    return data[:place] + struct.pack("<I", offset + distance) + data[place + 4 :]


def repeated(data):
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data.pkl", b"x")
    return buffer.getvalue()


def data_place(data, key):
    """Where the data of a storage lie in an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = archive.getinfo(f"archive/data/{key}")
        name_size, extra_size = struct.unpack_from("<HH", data, info.header_offset + 26)
        return range(start := info.header_offset + 30 + name_size + extra_size, start + info.file_size)


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("key", range(len(TENSORS)))
def test_a_bit_flipped_in_any_storage_of_an_archive(tmp_path, key):
    """Each tensor is verified when it is read; those in other storages are read all the same."""
    place = data_place(ZIP, key)
    path = write_bin(tmp_path, flipped(ZIP, place[len(place) // 2]))
    tensors = read_torch(path).tensors
    damaged = list(TENSORS)[key]
    with pytest.raises(CheckpointError, match=f"its part 'archive/data/{key}' does not have its checksum"):
        tensors[damaged].float32()
    for name in TENSORS.keys() - {damaged}:
        np.testing.assert_array_equal(tensors[name].float32(), TENSORS[name])


def test_an_archive_that_was_written_without_checksums_is_read(tmp_path):
    torch = need_torch()
    torch.serialization.set_crc32_options(False)
    try:
        path = write_bin(tmp_path, torch_bytes(TENSORS))
    finally:
        torch.serialization.set_crc32_options(True)
    tensors = read_torch(path).tensors
    assert all(np.array_equal(tensors[name].float32(), TENSORS[name]) for name in TENSORS)


def test_entries_that_share_their_bytes(tmp_path):
    """The directory has the last storage once more, under another name."""
    start = ZIP.rindex(b"PK\x01\x02", 0, ZIP.rindex(b"/data/"))
    record = ZIP[start : ZIP.index(b"PK\x01\x02", start + 4)]
    again = record.replace(b"/data/", b"/dat2/")
    end = ZIP.rindex(b"PK\x05\x06")
    counts = struct.pack("<HHI", *(count + 1 for count in struct.unpack_from("<HH", ZIP, end + 8)), 0)
    (size,) = struct.unpack_from("<I", ZIP, end + 12)
    tail = ZIP[end : end + 8] + counts[:4] + struct.pack("<I", size + len(again)) + ZIP[end + 16 :]
    zip64 = ZIP.find(b"PK\x06\x06")
    directory_end = zip64 if zip64 >= 0 else end
    refuse(write_bin(tmp_path, ZIP[:directory_end] + again + tail), "laid over one")


def test_tensors_that_share_one_storage_beyond_reason(tmp_path):
    row = np.zeros(10_000, np.float32)
    layers = {f"h.{i}.bias": row for i in range(50)}
    assert len(read_torch(write_bin(tmp_path, torch_bytes(layers))).tensors) == 50
    layers = {f"h.{i}.bias": row for i in range(500)}
    refuse(write_bin(tmp_path, torch_bytes(layers)), "sharing their storages beyond reason")


def legacy(structure, keys, data=b"", head=None):
    parts = [*(head or legacy_head()), structure, pickle.dumps(keys, protocol=2)]
    return b"".join(parts) + data


FOUR = struct.pack("<Q4f", 4, 0, 1, 2, 3)
OTHER_MAGIC = [pickle.dumps(7, 2), *legacy_head()[1:]]
OTHER_ENDIAN = [*legacy_head()[:2], pickle.dumps({"little_endian": False}, 2)]
BAD |= {
    "legacy: storage cut": (lambda: legacy(view(), ["0"], FOUR[:-1]), "truncated or damaged"),
    "legacy: count that lies": (
        lambda: legacy(view(), ["0"], b"\xff" * 8 + FOUR[8:20]),
        "truncated or damaged",
    ),
    "legacy: unknown key": (lambda: legacy(view(), ["1"], FOUR), "no tensor uses"),
    "legacy: other magic number": (lambda: legacy(view(), ["0"], FOUR, OTHER_MAGIC), "does not begin"),
    "legacy: big-endian": (lambda: legacy(view(), ["0"], FOUR, OTHER_ENDIAN), "big-endian"),
    "legacy: data cut": (lambda: LEGACY[:-100], "truncated or damaged"),
    "a tar file": (lambda: b"storages\0" + b"\0" * 2000, "does not begin"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_state_dict(tmp_path, case):
    make, sentence = BAD[case]
    refuse(write_bin(tmp_path, make()), sentence)


def damage(data, draw):
    """A few bytes changed, a piece cut out, or the end cut off."""
    kind = draw(st.sampled_from(["bytes", "cut", "end"]))
    place = draw(st.integers(0, len(data) - 1))
    if kind == "bytes":
        new = draw(st.binary(min_size=1, max_size=8))
        return data[:place] + new + data[place + len(new) :]
    return data[:place] + (b"" if kind == "end" else data[place + draw(st.integers(1, 64)) :])


@pytest.mark.filterwarnings("ignore:invalid escape")  # pickletools, of text that damage made
@pytest.mark.parametrize("form", ["model.safetensors", "zip", "legacy"])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_is_either_refused_or_harmless(tmp_path, form, data):
    """Whatever happens to a file: a CheckpointError, or tensors that lie inside it; no crash, no other error."""
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    if form == "model.safetensors":
        path = write_checkpoint(tmp_path) / form
    else:
        write_config(tmp_path)
        path = write_bin(tmp_path, ZIP if form == "zip" else LEGACY)
    path.write_bytes(damage(path.read_bytes(), data.draw))
    try:
        checkpoint = open_checkpoint(tmp_path)
        tensors = [checkpoint.tensor(name) for name in checkpoint.stored]
    except CheckpointError:
        return
    assert all(tensor.dtype == np.float32 for tensor in tensors)


@pytest.mark.parametrize("name", ["mp_rank_00", "iter_0000007"])
def test_a_folder_of_ranks_that_is_a_link_out_of_the_folder(tmp_path, name):
    megatron(tmp_path / "model", random_tensors(prefix=""))
    place = next((tmp_path / "model").rglob(name))
    place.rename(tmp_path / "outside")
    place.symlink_to(tmp_path / "outside")
    assert_refused(tmp_path / "model", f"{name} cannot be read: it is a link out of its folder")


@pytest.mark.parametrize("has_blobs", [True, False])
def test_links_of_the_hubs_cache_and_a_false_one(tmp_path, has_blobs):
    """A snapshot's files are links to its repository's blobs, unless that folder is a link itself."""
    blobs = write_checkpoint(tmp_path / "outside")
    if has_blobs:
        blobs.rename(tmp_path / "blobs")
    else:
        (tmp_path / "blobs").symlink_to(blobs)
    (folder := tmp_path / "snapshots" / "main").mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (folder / path.name).symlink_to(f"../../blobs/{path.name}")
    if has_blobs:
        assert open_checkpoint(folder).path == folder
    else:
        assert_refused(folder, "is a link out of its folder")


def test_a_link_that_a_user_names(tmp_path, capsys):
    write_checkpoint(tmp_path / "outside")
    (folder := tmp_path / "folder").mkdir()
    (folder / "all").symlink_to(tmp_path / "outside")
    (folder / "x").symlink_to(tmp_path / "outside" / "model.safetensors")
    write_config(folder)
    for name, beside in (("all", folder / "all"), ("x", folder)):
        assert open_checkpoint(folder / name).folder == beside
        assert cli.main(["info", "--json", str(folder / name)]) == 0
        assert json.loads(capsys.readouterr().out)["files"].keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin", "shards", "x.gguf", "ckpt.pt"])
def test_weights_that_are_links_to_a_shared_disk(tmp_path, form, capsys):
    """They load and are hashed, next to texts that must lie in the folder."""
    (shared := tmp_path / "shared").mkdir()
    (folder := tmp_path / "folder").mkdir()
    arrays = random_tensors(prefix="")
    if form == "x.gguf":
        (gguf(shared, arrays) / "model.gguf").rename(shared / form)
    elif form == "ckpt.pt":
        (shared / form).write_bytes(own_bytes(nanogpt_state(arrays)))
    elif form == "pytorch_model.bin":
        (shared / form).write_bytes(own_bytes(arrays))
    else:
        save_file(arrays, shared / form)
    if form == "shards":
        write_json(folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(arrays, form)})
    write_config(folder)
    (folder / form).symlink_to(shared / form)
    assert_holds(open_checkpoint(folder), arrays)
    assert cli.main(["info", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["files"].keys() == {"config.json", form}
    (tmp_path / "vocab.txt").write_text("a secret")
    (folder / "vocab.txt").symlink_to(tmp_path / "vocab.txt")
    with pytest.raises(CheckpointError, match=r"vocab\.txt cannot be read: it is a link out of its folder"):
        load_tokenizer(open_checkpoint(folder))


@pytest.mark.parametrize("tracker", ["latest", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("name", ["../outside", "iter_1/../../outside", ".", "", "absent"])
def test_a_file_that_names_the_latest_folder_names_one_beside_it(tmp_path, tracker, name):
    for folder in ("outside", "model/iter_1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "model" / tracker).write_text(name)
    assert_refused(tmp_path / "model", f"{tracker} names no folder beside it")
