"""Converted checkpoints: the same bits as packing at load, written whole or not at all, refused where damaged."""

import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from support import golden_models, tiny_checkpoint
from support.engines import sample_of
from support.family_models import write_family
from support.paths import ROOT, VOCAB_SIZE
from support.tables import rows
from support.torch_files import torch_bytes
from tinygpt import LLM, SamplingParams
from tinygpt.cli import main as cli
from tinygpt.cli.convert import FORMATS
from tinygpt.engine.model_runner import ModelSource
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.evaluation.calibration import calibrate
from tinygpt.kernels.cpu import arrays as model_arrays
from tinygpt.kernels.cpu import load
from tinygpt.llm_args import LLMArgs
from tinygpt.text.gpt2_bpe import PREPARED_FILE
from tinygpt.text.tokenizer import Tokenizer
from tinygpt.weights.checkpoint import BOUNDARY, PACKED_FILE, open_packed
from tinygpt.weights.config import DTYPES
from tinygpt.weights.containers.safetensors import read_safetensors
from tinygpt.weights.open import open_checkpoint

IDS = [3, 1, 4, 1, 5, 9]
TEXT = (
    "There was once a miller who had three sons, and when he died he left them his mill, his ass and his cat."
)


def tiny_source(folder: Path, is_tied: bool = True) -> Path:
    """A model smaller than one panel, of which no size is a whole number of anything."""
    tensors = tiny_checkpoint.random_tensors()
    if not is_tied:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"][::-1].copy()
    return tiny_checkpoint.write_checkpoint(folder, tensors, tie_word_embeddings=is_tied)


def converted(source, target: Path, dtype: str) -> Path:
    assert cli.main(["convert", str(source), str(target), "--dtype", dtype]) == 0
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_source(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def demo_int8(tmp_path_factory):
    return converted("demo", tmp_path_factory.mktemp("demo") / "int8", "int8")


@pytest.fixture
def tiny_int8(source, tmp_path):
    return converted(source, tmp_path / "int8", "int8")


def header_of(file: Path) -> tuple[dict, int]:
    """A safetensors file's header, and where its data starts."""
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), 8 + size


def rewrite(file: Path, change=lambda header: None, shift: int = 0) -> None:
    """Put `change(header)` in front of the file's data, which then begins `shift` bytes after a boundary."""
    header, start = header_of(file)
    data = file.read_bytes()[start:]
    text = json.dumps(change(header) or header).encode()
    text += b" " * (-(8 + len(text)) % BOUNDARY + shift)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_array_is_that_of_packing_at_load(tmp_path, dtype, is_tied):
    source = tiny_source(tmp_path / "source", is_tied)
    expected = model_arrays.to_file(load.load_arrays(open_checkpoint(source), dtype))
    checkpoint = open_checkpoint(converted(source, tmp_path / "converted", dtype))
    layout = model_arrays.layout_of(checkpoint.config, dtype, checkpoint.tied)
    found = checkpoint.packed.arrays(layout, model_arrays.PACKING)
    assert (checkpoint.converted_to, checkpoint.tied) == (dtype, is_tied)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape), name
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_tokens_are_those_of_quantising_at_load(tmp_path, dtype):
    target = converted("demo", tmp_path / "demo", dtype)
    params = SamplingParams(max_tokens=8, temperature=0.8, top_k=40, seed=1)
    with LLM("demo", dtype, max_num_seqs=1) as at_load, LLM(target, max_num_seqs=1) as mapped:
        assert np.array_equal(at_load.logits(IDS), mapped.logits(IDS))
        outputs = [sample_of(llm, "Once upon a time", params) for llm in (at_load, mapped)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text


def test_folder_holds_the_small_files_as_they_were(demo_int8):
    source = open_checkpoint("demo").path
    copied = {"config.json", "vocab.json", "merges.txt"}
    assert {path.name for path in demo_int8.iterdir()} == copied | {PACKED_FILE, PREPARED_FILE}
    for name in copied:
        assert (demo_int8 / name).read_bytes() == (source / name).read_bytes()


def test_panels_are_mapped_on_vector_boundaries(demo_int8):
    checkpoint = open_checkpoint(demo_int8)
    arrays = checkpoint.packed.arrays(
        model_arrays.layout_of(checkpoint.config, "int8", True), model_arrays.PACKING
    )
    _, start = header_of(demo_int8 / PACKED_FILE)
    assert start % BOUNDARY == 0
    for name, array in arrays.items():
        assert array.flags.carray, name
        assert array.nbytes % BOUNDARY or array.ctypes.data % BOUNDARY == 0, name
        assert array.base is not None, name


def test_the_file_says_what_it_is(demo_int8):
    metadata = header_of(demo_int8 / PACKED_FILE)[0]["__metadata__"]
    file = demo_int8 / PACKED_FILE
    assert metadata.pop("crc32") == f"{zlib.crc32(file.read_bytes()[header_of(file)[1] :]):08x}"
    packing = {name: str(number) for name, number in model_arrays.PACKING.items()}
    about = {
        "format": "tinygpt packed weights",
        "version": "3",
        "dtype": "int8",
        "tied": "true",
        "source": "demo",
    }
    about |= {"vocab_size": str(VOCAB_SIZE)}
    assert metadata == about | packing


def test_a_calibration_is_told_and_used(tmp_path, demo_int8):
    text = tmp_path / "text"
    text.write_text(TEXT, encoding="utf-8")
    options = ["--dtype", "int8", "--smooth", "0.75", "--calibrate", str(text)]
    assert cli.main(["convert", "demo", str(tmp_path / "int8"), *options]) == 0
    header, _ = header_of(tmp_path / "int8" / PACKED_FILE)
    about = {name: value for name, value in header["__metadata__"].items() if name.startswith("smooth")}
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert about == {"smooth": "0.75", "smooth_text_sha256": digest, "smooth_samples": "1"}
    with LLM(tmp_path / "int8", max_num_seqs=1) as llm, LLM(demo_int8, max_num_seqs=1) as plain:
        calibrated = llm.logits(IDS)
        by_weights = plain.logits(IDS)
    assert 0 < np.abs(calibrated - by_weights).max() < 1


def test_sizes_measured_before_do_as_the_text_does(tmp_path):
    """All but the biases, as act-scales have no means; --smooth is 0.5 where it is not given."""
    text = tmp_path / "text"
    scales = tmp_path / "scales.pt"
    text.write_text(TEXT, encoding="utf-8")
    checkpoint = open_checkpoint("demo")
    found = calibrate(checkpoint, TEXT, Tokenizer.from_folder(checkpoint.path).encode(TEXT), "int8", 0.5)
    scales.write_bytes(torch_bytes({f"transformer.{name}": size for name, size in found.sizes.items()}))
    files = []
    for name, options in {"a": ["--calibrate", str(text)], "b": ["--act-scales", str(scales)]}.items():
        assert cli.main(["convert", "demo", str(tmp_path / name), *options]) == 0
        files.append(read_safetensors(tmp_path / name / PACKED_FILE).tensors)
    for name, one in files[0].items():
        other = files[1][name]
        size = int(np.prod(one.shape)) * (1 if one.dtype == "U8" else 4)
        parts = [tensor.file.data[tensor.offset : tensor.offset + size] for tensor in (one, other)]
        is_corrected = name.endswith("_bias") and not name.startswith("ln")
        assert (parts[0] == parts[1]) != is_corrected, name


def test_npz_holds_float16_where_it_is_asked_for(source, tmp_path):
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--to", "npz", "--dtype", "FP16"]) == 0
    with np.load(tmp_path / "out" / "model.npz") as arrays:
        assert {arrays[name].dtype for name in arrays} == {np.dtype(np.float16)}


def test_a_head_that_is_left_out_is_named(source, tmp_path, capsys):
    folder = shutil.copytree(source, tmp_path / "source")
    golden_models.add_tensors(folder, {"score.weight": (2, 3)})
    assert cli.main(["convert", str(folder), str(tmp_path / "made")]) == 0
    assert "left out, as no text is made with them: score.weight" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["DST -m demo", "demo --threads 1 DST", "-t 1 demo DST"])
def test_the_source_may_be_given_as_in_all_commands(tmp_path, given):
    target = tmp_path / "int8"
    target.mkdir()  # an empty folder is filled
    assert cli.main(["convert", *given.replace("DST", str(target)).split()]) == 0
    assert open_checkpoint(target).converted_to == "int8"


@pytest.mark.parametrize("to", FORMATS)
def test_the_dtypes_of_a_format_are_those_of_the_help(capsys, to):
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    listed = ", ".join(FORMATS[to])
    shown = " ".join(capsys.readouterr().out.split())
    assert (f"precision of the weights: {listed};" if to is None else f"with --to {to}, {listed};") in shown


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left"),
    ],
)
def test_a_failed_conversion_leaves_nothing(source, tmp_path, monkeypatch, capsys, error, code, says):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    assert cli.main(["convert", str(source), str(tmp_path / "int8")]) == code
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_convert_leaves_no_checkpoint(source, tmp_path):
    """Killed just before it would be done: what it leaves does not have the name of the checkpoint."""
    script = (
        "import os, pathlib, sys; from tinygpt.cli import main as cli;"
        "pathlib.Path.rename = lambda *_: os._exit(9); cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "convert", str(source), str(tmp_path / "int8")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("int8.partial-")
    converted(source, tmp_path / "int8", "int8")


def test_auto_is_the_checkpoints_own_dtype(tiny_int8, source):
    for *args, expected in ((tiny_int8, "int8"), (tiny_int8, "int8", "int8"), (source, "float32")):
        assert ModelSource.open(LLMArgs(*args)).dtype == expected


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_another_dtype_is_refused(tiny_int8, dtype):
    with pytest.raises(RequestError, match="is converted to 'int8'"):
        LLM(tiny_int8, dtype=dtype)


def test_a_dtype_that_this_cpu_lacks_is_not_unpacked(tiny_int8, monkeypatch):
    monkeypatch.setattr("tinygpt.kernels.cpu.DTYPES", ("float32",))
    with pytest.raises(RequestError, match="'int8' and device 'cpu' computes in 'float32' only"):
        LLM(tiny_int8, device="reference")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tied", "untied", "gpt-1", "opt-350m", "bloom-6", "xglm"])
def test_a_gpu_has_the_bits_of_the_original(tmp_path, device, name, dtype):
    folder = tmp_path / "source"
    original = tiny_source(folder, name == "tied") if "tied" in name else write_family(folder, name)
    packed = converted(original, tmp_path / "packed", dtype)
    sources = [ModelSource.open(LLMArgs(*args, device="cuda")) for args in ((original, dtype), (packed,))]
    for ours, theirs in zip(*(arrays_in(source.load_params(1)) for source in sources), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def arrays_in(params) -> list[np.ndarray]:
    """Of a GPU, simulated."""
    records = *params.linears.values(), *params.norms.values(), *params.norms_after.values()
    return [params.wpe, params.slopes, *(array for record in records for array in record[:3])]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("model", ["demo", "xglm"])
def test_quantized_weights_are_unpacked_without_their_factors(tmp_path, model, dtype):
    original = model if model == "demo" else write_family(tmp_path / "source", model)
    packed = converted(original, tmp_path / dtype, dtype)
    logits = []
    for device in ("cpu", "reference"):
        with LLM(packed, device=device, max_num_seqs=1) as llm:
            logits.append(llm.logits(IDS))
    assert np.linalg.norm(logits[0] - logits[1]) < 0.03 * np.linalg.norm(logits[0])


def with_bytes(change):
    return lambda file: file.write_bytes(change(file.read_bytes()))


def with_header(change):
    return lambda file: rewrite(file, change)


def with_metadata(**fields):
    return with_header(lambda header: header["__metadata__"].update(fields))


def with_config(**fields):
    return lambda file: tiny_checkpoint.write_config(file.parent, **fields)


def with_bit_flipped(position: int):
    """Of the data, from its start or, below 0, its end."""

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[(header_of(file)[1] if position >= 0 else 0) + position] ^= 1
        file.write_bytes(data)

    return flip


DAMAGE = {
    "empty": (with_bytes(lambda data: b""), "is empty"),
    "cut in the header": (with_bytes(lambda data: data[:100]), "a damaged safetensors file"),
    "cut in the data": (with_bytes(lambda data: data[:-1]), "a damaged safetensors file"),
    "too long": (with_bytes(lambda data: data + b"\0"), "a damaged safetensors file"),
    "no file of ours": (
        with_bytes(lambda data: save({"wpe": np.zeros((2, 2), np.float32)})),
        "not made by tinygpt's convert",
    ),
    "a tensor renamed": (
        with_header(lambda header: {("wpf" if name == "wpe" else name): header[name] for name in header}),
        "wpe is missing(.|\n)*wpf is unexpected",
    ),
    "a tensor reshaped": (
        with_header(lambda header: header["wpe"].update(shape=[8, 6])),
        r"wpe is float32 \(8, 6\) and should be float32 \(6, 8\)",
    ),
    "a tensor retyped": (with_header(lambda header: header["wpe"].update(dtype="I32")), "wpe is I32"),
    "shifted": (lambda file: rewrite(file, shift=4), "c_attn.panels does not start on its boundary"),
    "another config": (
        with_config(n_inner=280),
        r"c_fc_bias is float32 \(2, 20\) and should be float32 \(2, 280\)",
    ),
    "another vocabulary": (with_config(vocab_size=12), "vocab_size is 11 and 12 is asked for"),
    **{
        f"a bit flipped at {place}": (
            with_bit_flipped(place),
            "is damaged, its data does not have the checksum",
        )
        for place in (0, 1000, -1)
    },
}
# Fields of the file's metadata.
METADATA = rows("""
{"format": "gguf"} | not made by tinygpt's convert
{"version": "1"} | version 1 .* reads version 3
{"panel": "48"} | its panel is 48 and 64 is asked for
{"group": "32"} | its group is 32
{"packing": "0"} | its packing is 0
{"dtype": "int4"} | c_fc.group_scales is missing(.|\\n)*c_fc.scales is unexpected
{"dtype": "int2"} | damaged metadata
{"tied": "maybe"} | damaged metadata
{"tied": "false"} | wte.panels is missing
{"crc32": "00000000"} | is damaged, its data does not have the checksum
""")
DAMAGE |= {str(fields): (with_metadata(**fields), says) for fields, says in METADATA}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_with_what_to_do(tiny_int8, kind):
    damage, says = DAMAGE[kind]
    damage(tiny_int8 / PACKED_FILE)
    with pytest.raises(CheckpointError, match=says) as caught:
        LLM(tiny_int8)
    assert "`tinygpt convert" in str(caught.value)


def test_two_kinds_of_weights_in_one_folder_are_refused(tiny_int8, source):
    shutil.copy(source / "model.safetensors", tiny_int8)
    with pytest.raises(CheckpointError, match="holds both"):
        open_packed(tiny_int8)
