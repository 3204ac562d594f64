"""TensorFlow's bundles, next to one that TensorFlow wrote, and damaged files."""

import hashlib
import re
import sys

import numpy as np
import pytest

from support import tf_writer
from support.foreign import openai_tf, tf_arrays
from support.paths import ROOT
from support.tf_writer import field, table, write_bundle
from support.tiny_checkpoint import assert_refused, random_tensors, shapes_of, write_json
from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.tf_bundle import read_tf_bundle
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")

# A bundle that tf.compat.v1.train.Saver of TensorFlow 2.21 wrote: 2 layers, C 8, V 96, P 16.
INDEX = (ROOT / "tests" / "data" / "tensorflow" / "model.ckpt.index").read_bytes()
SHA256_OF_DATA = "3cf1748665556d2836aaffee349a083b7879bee107559f21cbf596a11c25db61"


def their_arrays():
    sizes = {name: np.empty(shape) for name, shape in shapes_of(8, 32, 2, 96, 16).items()}
    shapes = {name: array.shape for name, array in tf_arrays(sizes).items()}
    arrays = {}
    for t, name in enumerate(sorted(shapes)):
        k = np.arange(np.prod(shapes[name]))
        values = ((t * 7919 + k * 104729) % 2003 - 1001) / 1024
        arrays[name] = values.astype(np.float32).reshape(shapes[name])
    return arrays


def test_the_bundle_that_tensorflow_wrote(tmp_path):
    """The writer of these tests writes the same bytes."""
    arrays = their_arrays()
    assert write_bundle(tmp_path / "model.ckpt", arrays).read_bytes() == INDEX
    data = (tmp_path / "model.ckpt.data-00000-of-00001").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256_OF_DATA
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\n')
    write_json(
        tmp_path / "hparams.json", {"n_vocab": 96, "n_ctx": 16, "n_embd": 8, "n_head": 2, "n_layer": 2}
    )
    tensors = read_tf_bundle(tmp_path / "model.ckpt.index").tensors
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].float32(), array, err_msg=name)
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(
        checkpoint.tensor("h.1.mlp.c_fc.weight"), arrays["model/h1/mlp/c_fc/w"][0].T
    )
    assert checkpoint.tied


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint16", "int64"])
def test_dtypes(tmp_path, dtype):
    values = np.arange(12).reshape(3, 4)
    array = values.astype(dtype)
    if dtype == "uint16":
        array = (values.astype(np.float32).view(np.uint32) >> 16).astype(dtype)
    tensor = read_tf_bundle(write_bundle(tmp_path / "x", {"a": array})).tensors["a"]
    assert tensor.is_floating == (dtype != "int64")
    if tensor.is_floating:
        np.testing.assert_array_equal(tensor.float32(), values)


@pytest.mark.parametrize(("num_shards", "per_block"), [(3, 10**6), (1, 2), (2, 1)])
def test_several_data_files_and_blocks(tmp_path, num_shards, per_block):
    write_json(tmp_path / "hparams.json", {"n_head": 2})
    index = write_bundle(tmp_path / "x", tf_arrays(TENSORS), num_shards, per_block)
    checkpoint = open_checkpoint(index)
    np.testing.assert_array_equal(checkpoint.tensor("wte.weight"), TENSORS["wte.weight"])
    np.testing.assert_array_equal(
        checkpoint.tensor("h.1.attn.c_proj.weight"), TENSORS["h.1.attn.c_proj.weight"].T
    )
    assert len(checkpoint.files) == num_shards


def test_the_latest_of_several_as_the_file_checkpoint_names_it(tmp_path):
    openai_tf(tmp_path, TENSORS)
    write_bundle(tmp_path / "model-1000", tf_arrays(TENSORS | {"ln_f.bias": np.full(8, 5, np.float32)}))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/another/machine/model-1000"\n')
    assert open_checkpoint(tmp_path).tensor("ln_f.bias")[0] == 5
    (tmp_path / "checkpoint").unlink()
    assert_refused(tmp_path, r"several files .*: model-1000\.index, model\.ckpt\.index")


def test_an_optimizers_variables_are_ignored_by_name(tmp_path):
    arrays = tf_arrays(TENSORS)
    more = {f"{name}/Adam": array for name, array in arrays.items()} | {
        "beta1_power": np.ones((), np.float32)
    }
    more |= {"model/wte/Adam_1": arrays["model/wte"], "global_step": np.ones((), np.int64)}
    write_json(tmp_path / "hparams.json", {"n_head": 2})
    checkpoint = open_checkpoint(write_bundle(tmp_path / "x", arrays | more))
    assert sorted(checkpoint.ignored) == sorted(more)
    odd = write_bundle(tmp_path / "x", arrays | {"model/wte/Odd": arrays["model/wte"]})
    assert_refused(odd, "unexpected: model/wte/Odd")


def test_without_the_package_of_checksums_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert_refused(openai_tf(tmp_path, TENSORS), r"tinygpt\[tf\]")


def test_every_flipped_bit_of_a_variable_is_found(tmp_path):
    openai_tf(tmp_path, TENSORS)
    path = tmp_path / "model.ckpt.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    for place in np.random.default_rng(0).integers(0, len(data), 20):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(place) % 8
        path.unlink()
        path.write_bytes(damaged)
        checkpoint = open_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match=r"model/.* does not have its checksum"):
            [checkpoint.tensor(name) for name in checkpoint.stored]


ONES = np.ones(4, np.float32)
ENTRY = tf_writer.entry(ONES, 0, ONES.tobytes())
HEADER = (b"", field(1, 1))
WHOLE = table([HEADER, (b"a", ENTRY)])
STATISTICS, PADDING = 8 + 5, 36  # bytes


def test_every_flipped_byte_of_an_index_is_found_or_harmless(tmp_path):
    (tmp_path / "x.data-00000-of-00001").write_bytes(np.ones(4, np.float32).tobytes())
    path, harmless = tmp_path / "x.index", 0
    for place in range(len(WHOLE)):
        path.unlink(missing_ok=True)
        path.write_bytes(WHOLE[:place] + bytes([WHOLE[place] ^ 0x55]) + WHOLE[place + 1 :])
        try:
            tensors = read_tf_bundle(path).tensors
        except CheckpointError:
            continue
        assert tensors["a"].float32().tolist() == [1, 1, 1, 1]
        harmless += 1
    # What nobody reads: the block of statistics, where it lies, and the zeros behind it.
    assert harmless == STATISTICS + 2 + PADDING


REFUSED = {
    "no header": ([(b"a", ENTRY)], "has no header"),
    "big-endian": ([(b"", field(1, 1) + field(2, 1))], "big-endian"),
    "of the past": ([(b"", field(1, b"x"))], "from before 2017"),
    "2^40 data files": ([(b"", field(1, 2**40))], "data files"),
    "a data file that is not there": (
        [HEADER, (b"a", tf_writer.entry(ONES, 0, b"1" * 16, shard=7))],
        "none of",
    ),
    "in pieces": ([HEADER, (b"a", ENTRY + field(7, b""))], "in several pieces"),
    "another size": ([HEADER, (b"a", tf_writer.entry(ONES, 0, b"1" * 12))], "has 12 bytes"),
    "beyond the end": ([HEADER, (b"a", tf_writer.entry(ONES, 4, b"1" * 16))], "reaches to byte 20"),
    "over one another": ([HEADER, (b"a", ENTRY), (b"b", ENTRY)], "laid over one another"),
    "9 dimensions": (
        [HEADER, (b"a", tf_writer.entry(ONES.reshape(*[1] * 8, 4), 0, b"1" * 16))],
        "impossible shape",
    ),
    "a name of 2000 bytes": ([HEADER, (b"a" * 2000, ENTRY)], "too long a key"),
    "a shape that is a number": ([HEADER, (b"a", field(2, 5))], "a number stands"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_index_that_is_damaged_or_not_implemented(tmp_path, case):
    records, sentence = REFUSED[case]
    (tmp_path / "x.data-00000-of-00001").write_bytes(ONES.tobytes())
    (tmp_path / "x.index").write_bytes(table(records))
    assert_refused(tmp_path / "x.index", sentence, re.escape(str(tmp_path / "x")))


def test_keys_that_share_more_than_a_file_holds(tmp_path):
    records = [(b"", HEADER[1]), *((b"a" * 900 + f"{i:03}".encode(), b"") for i in range(500))]
    (tmp_path / "x.index").write_bytes(table(records, restart=1000))
    assert_refused(tmp_path / "x.index", "and keys of more than 20 times as many")


def test_variables_of_tensorflow_2s_objects_are_refused_by_name(tmp_path):
    arrays = {f"{name}/.ATTRIBUTES/VARIABLE_VALUE": array for name, array in tf_arrays(TENSORS).items()}
    assert_refused(write_bundle(tmp_path / "x", arrays), "objects of TensorFlow 2")
