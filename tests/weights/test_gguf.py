"""GGUF: blocks, tokenizers, what converting writes, and damaged files."""

import json
import re
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from support.family_models import write_family
from support.foreign import GGUF_KEYS, gguf_name, linear
from support.foreign import gguf as write_gguf_folder
from support.gguf_writer import gguf_bytes, plain
from support.processes import Result
from support.tables import rows
from support.tiny_checkpoint import assert_refused, assert_same_files, convert, random_tensors, write_json
from tinygpt import LLM
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.errors import CheckpointError
from tinygpt.weights.checkpoint import read_config
from tinygpt.weights.containers.gguf import AT_ONCE, read_gguf
from tinygpt.weights.convert.gguf import write_tensors
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_a_tensor_of_blocks_is_read_in_rows(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    (values, size) = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = np.random.default_rng(1).integers(0, 120, (2 * AT_ONCE + 6, size), np.uint8)  # no scale is a NaN
    shape = (len(blocks) // 2, 2 * values)
    path = tmp_path / "x.gguf"
    path.write_bytes(
        gguf_bytes({}, {"a": (shape, int(kind), blocks.tobytes()), "b": plain(np.ones(3, np.float32))})
    )
    tensors = read_gguf(path).tensors
    found = tensors["a"].float32()
    assert (found.shape, tensors["a"].dtype, tensors["a"].nbytes) == (shape, name, blocks.nbytes)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(blocks, kind).reshape(shape))
    tensors["a"].release()
    np.testing.assert_array_equal(tensors["b"].float32(), np.ones(3))


def test_blocks_without_the_package_name_its_extra(tmp_path, monkeypatch):
    """Plain tensors and Q8_0 need no package."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes({}, {"a": plain(np.ones(3, np.float32)), "b": ((1, 32), 8, bytes(34))}))
    assert read_gguf(path).tensors["b"].float32().tolist() == [[0] * 32]
    path.write_bytes(gguf_bytes({}, {"a": ((1, 256), 12, bytes(144))}))
    assert_refused(path, r"x\.gguf is in ggml's block format 12, .*tinygpt\[gguf\]")


def test_a_file_is_written_by_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"written by the package gguf: .*tinygpt\[gguf\]"):
        write_tensors(tmp_path / "x.gguf", "x", {}, {"a": np.ones(3)})
    assert not any(tmp_path.iterdir())


def test_the_file_says_what_it_is(tmp_path):
    path = write_gguf_folder(tmp_path, TENSORS, **{"gpt2.attention.layer_norm_epsilon": (6, 0.5)})
    checkpoint = open_checkpoint(path)
    assert (checkpoint.container, checkpoint.family) == ("GGUF", "GPT-2 of GGUF")
    assert checkpoint.config.layer_norm_epsilon == 0.5
    assert checkpoint.tied


def test_another_architecture_is_refused_by_name(tmp_path):
    path = write_gguf_folder(tmp_path, TENSORS, **{"general.architecture": (8, "mpt")})
    assert_refused(path, "'mpt' and must hold 'gpt2' or 'bloom'")


BLOOM_NAMES = rows("""
word_embeddings.                | token_embd.
word_embeddings_layernorm.      | token_embd_norm.
ln_f.                           | output_norm.
input_layernorm.                | attn_norm.
self_attention.query_key_value. | attn_qkv.
self_attention.dense.           | attn_output.
post_attention_layernorm.       | ffn_norm.
mlp.dense_h_to_4h.              | ffn_up.
mlp.dense_4h_to_h.              | ffn_down.
""")


def as_llama_cpp_has_it(name, array, heads):
    for theirs, ours in BLOOM_NAMES:
        name = name.replace(theirs, ours)
    if "attn_qkv" in name:
        rows = array.reshape(heads, 3, -1, *array.shape[1:])
        array = np.concatenate([rows[:, part].reshape(-1, *array.shape[1:]) for part in range(3)])
    name = name.removeprefix("transformer.").replace("lm_head", "output")
    return name.replace("h.", "blk."), plain(np.ascontiguousarray(array))


def write_bloom(folder, path, **others):
    """A GGUF file of the BLOOM in a folder; `others` are keys of it."""
    expected = open_checkpoint(folder)
    heads = expected.config.n_head
    arrays = load_file(folder / "model.safetensors")
    tensors = dict(as_llama_cpp_has_it(name, array, heads) for name, array in arrays.items())
    config = expected.config
    sizes = {
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "feed_forward_length": config.inner_size,
        "attention.head_count": heads,
    }
    keys = {
        "general.architecture": (8, "bloom"),
        **{f"bloom.{name}": (4, size) for name, size in sizes.items()},
    }
    path.write_bytes(gguf_bytes(keys | {"bloom.attention.layer_norm_epsilon": (6, 1e-5)} | others, tensors))


def test_a_bloom_of_gguf_becomes_hugging_faces(tmp_path):
    """All the tensors that it was made of, and a config.json that says what its header says."""
    write_bloom(write_family(tmp_path / "bloom", "bloom-6"), tmp_path / "x.gguf")
    folder = convert(tmp_path / "x.gguf", tmp_path / "there", "--to", "safetensors")
    assert_same_files(folder, tmp_path / "bloom")
    said = {"bos_token_id": 1, "eos_token_ids": (2,)}
    assert open_checkpoint(folder).config == replace(read_config(tmp_path / "bloom"), **said)


@pytest.mark.parametrize("source", ["bloom", "x.gguf"])
@pytest.mark.parametrize("name", ["bloom-6", "bloom-untied"])
def test_bloom_is_written_as_llama_cpp_has_it(tmp_path, name, source):
    """The bytes of a file that was made of Hugging Face's tensors by other code."""
    write_bloom(write_family(tmp_path / "bloom", name), tmp_path / "x.gguf")
    folder = convert(tmp_path / source, tmp_path / "there", "--to", "gguf")
    expected = read_gguf(tmp_path / "x.gguf")
    found = read_gguf(folder / "model.gguf")
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[key].float32(), tensor.float32(), err_msg=key)
    assert found.metadata.items() >= expected.metadata.items()


def test_the_width_of_mlps_is_the_tensors(tmp_path):
    folder = write_family(tmp_path, "bloom-6")
    write_bloom(folder, tmp_path / "x.gguf", **{"bloom.feed_forward_length": (4, 99)})
    assert open_checkpoint(tmp_path / "x.gguf").config.inner_size == 120
    path = write_gguf_folder(tmp_path / "gpt2", TENSORS, **{"gpt2.feed_forward_length": (4, 99)})
    assert open_checkpoint(path).config.inner_size == 20


def test_a_bloom_whose_mlps_are_of_another_width(tmp_path):
    tensors = {
        "token_embd.weight": plain(np.ones((3, 30), "f4")),
        "blk.0.ffn_up.weight": plain(np.ones((99, 30), "f4")),
    }
    keys = {"general.architecture": (8, "bloom"), "bloom.attention.head_count": (4, 6)}
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(keys, tensors))
    assert_refused(tmp_path / "x.gguf", "a BLOOM with MLPs of 99, which must be 4 times 30")


def test_arrays_in_arrays_are_passed_over(tmp_path):
    nested = (9, (9, [(4, [1, 2]), (8, ["a"])]))
    assert open_checkpoint(write_gguf_folder(tmp_path, TENSORS, **{"general.x": nested})).tied
    deep = (4, [1])
    for _ in range(9):
        deep = (9, [deep])
    assert_refused(write_gguf_folder(tmp_path, TENSORS, **{"general.x": (9, deep)}), "an array of type 9")


def test_a_vocabulary_alone_is_told(tmp_path):
    (tmp_path / "vocab.gguf").write_bytes(gguf_bytes(GGUF_KEYS | TOKENIZER, {}))
    assert_refused(tmp_path, "holds a vocabulary, and no weights: give the model's file")


def test_parts_of_one_file_are_told_to_be_joined(tmp_path):
    for part in range(3):
        keys = GGUF_KEYS | {"split.count": (4, 3), "split.no": (4, part)}
        (tmp_path / f"m-{part + 1:05}-of-00003.gguf").write_bytes(gguf_bytes(keys, {}))
    assert_refused(
        tmp_path, r"m-00001-of-00003.gguf is one of 3 parts: join them with `llama-gguf-split --merge`"
    )


def test_a_type_that_is_not_implemented_is_named(tmp_path):
    tensors = {gguf_name(name): plain(array) for name, array in linear(TENSORS).items()}
    tensors["blk.1.ffn_up.weight"] = ((20, 8), 24, b"\0" * 999)
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(GGUF_KEYS, tensors))
    assert_refused(tmp_path / "x.gguf", r"not implemented: blk\.1\.ffn_up\.weight is ggml type 24\n")


TOKENIZER = {
    "tokenizer.ggml.model": (8, "gpt2"),
    "tokenizer.ggml.pre": (8, "gpt-2"),
    "tokenizer.ggml.tokens": (
        9,
        (8, ["a", "b", "c", "ab", "<end>", "Ġ", "abc", "<user>", "[PAD8]", "d", "e"]),
    ),
    "tokenizer.ggml.token_type": (9, (5, [1, 1, 1, 1, 3, 1, 1, 4, 5, 1, 1])),
    "tokenizer.ggml.merges": (9, (8, ["a b", "ab c"])),
    "tokenizer.ggml.bos_token_id": (4, 4),
    "tokenizer.ggml.eos_token_id": (4, 4),
}


def test_its_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write_gguf_folder(tmp_path, TENSORS, **TOKENIZER))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("abcab <end>a<user>") == [6, 3, 5, 4, 0, 7]
    assert tokenizer.decode([6, 3, 5, 4, 8, 7]) == "abcab <end><user>"
    assert tokenizer.special_ids == {4}
    assert tokenizer.eos_token_id == 4
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_ids) == (4, (4,))


ENDS = [
    ({"eot_token_id": (4, 7)}, (4, 7)),
    ({"eom_token_id": (4, 7), "eot_token_id": (4, 9)}, (4, 9, 7)),
    ({"eos_token_id": (9, (4, [4, 7]))}, (4, 7)),
    ({"eot_token_id": (4, 4)}, (4,)),
]


@pytest.mark.parametrize(("keys", "ends"), ENDS, ids=str)
def test_all_ends_that_it_names_are_ends(tmp_path, keys, ends):
    """And their texts that need no key in llama.cpp, unless they are usual tokens."""
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    checkpoint = open_checkpoint(write_gguf_folder(tmp_path, TENSORS, **TOKENIZER | named))
    assert checkpoint.config.eos_token_ids == ends
    assert load_tokenizer(checkpoint).eos_token_id == 4


def test_control_tokens_spelled_as_ends_are_ends(tmp_path):
    tokens = ["a", "b", "<|im_end|>", "<|eot_id|>", "</s>", "c", "<|im_start|>", "d", "e", "f", "g"]
    kinds = [1, 1, 3, 4, 1, 1, 3, 1, 1, 1, 1]
    spelled = {
        "tokenizer.ggml.tokens": (9, (8, tokens)),
        "tokenizer.ggml.token_type": (9, (5, kinds)),
        "tokenizer.ggml.merges": (9, (8, [])),
        "tokenizer.ggml.eos_token_id": (4, 0),
    }
    path = write_gguf_folder(tmp_path, TENSORS, **TOKENIZER | spelled)
    assert open_checkpoint(path).config.eos_token_ids == (0, 2, 3)
    there = convert(path, tmp_path / "there", "--to", "gguf")
    assert open_checkpoint(there).config.eos_token_ids == (0, 2, 3)


def test_ends_that_it_does_not_name_are_those_of_generation_config(tmp_path):
    """Also of a training checkpoint."""
    keys = {name: value for name, value in TOKENIZER.items() if "eos" not in name}
    path = write_gguf_folder(tmp_path, TENSORS, **keys)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [3, 5]})
    assert open_checkpoint(path).config.eos_token_ids == (3, 5)


def test_its_chat_template_goes_before_a_folders(tmp_path):
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    template = {"tokenizer.chat_template": (8, source)}
    folder = write_gguf_folder(tmp_path, TENSORS, **TOKENIZER, **template)
    (tmp_path / "chat_template.jinja").write_text("another")
    with LLM(folder / "model.gguf") as llm:
        assert llm.chat_template.render([{"content": "b"}]) == "<end>b<end>"


def ending_with(token_id):
    return {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<end>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<end>": {"id": "<end>", "ids": [token_id], "tokens": ["<end>"]}},
    }


@pytest.mark.parametrize(
    "change",
    [
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        {"post_processor": ending_with(5)},
        {"post_processor": ending_with(4)},
    ],
    ids=["a space", "a token behind", "behind, the token that begins texts"],
)
def test_a_tokenizer_that_gguf_cannot_hold_is_left_out_and_said_to_be(tmp_path, capsys, change):
    source = write_gguf_folder(tmp_path / "x", TENSORS, **TOKENIZER)
    folder = convert(source, tmp_path / "folder", "--to", "safetensors")
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**spec, **change}))
    result = Result(capsys, "convert", [str(folder), str(tmp_path / "there"), "--to", "gguf"])
    assert result.code == 0
    assert (
        "the file will have no tokenizer: it puts more around a text than the token that begins one"
        in result.err
    )
    assert open_checkpoint(tmp_path / "there" / "model.gguf").read_tokenizer() is None


def test_a_written_tokenizer_is_read_by_the_library(tmp_path):
    source = write_gguf_folder(tmp_path / "x", TENSORS, **TOKENIZER)
    folder = convert(source, tmp_path / "folder", "--to", "safetensors")
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = load_tokenizer(open_checkpoint(source))
    assert ours.special_ids
    for text in ("abc", "ab<end>c"):
        assert theirs.encode(text).ids == ours.encode(text)


def test_a_tokenizer_that_cuts_texts_as_blooms_does(tmp_path):
    """Words of anything but punctuation, which GPT-2 cuts from letters: here and there, and back."""
    tokens = ["a", "b", "c", "ab", "<end>", "\u0120", "-", "b-", "b-c", ".", "\u0120a"]
    keys = TOKENIZER | {
        "tokenizer.ggml.pre": (8, "bloom"),
        "tokenizer.ggml.tokens": (9, (8, tokens)),
        "tokenizer.ggml.token_type": (9, (5, [1, 1, 1, 1, 3, *[1] * 6])),
        "tokenizer.ggml.merges": (9, (8, ["b -", "b- c", "\u0120 a"])),
    }
    path = write_gguf_folder(tmp_path / "x", TENSORS, **keys)
    again = convert(path, tmp_path / "gguf", "--to", "gguf")
    for there in (
        path,
        again / "model.gguf",
        convert(path, tmp_path / "folder", "--to", "safetensors"),
    ):
        assert load_tokenizer(open_checkpoint(there)).encode("b-c. a<end>") == [8, 9, 10, 4]
    assert read_gguf(again / "model.gguf").metadata["tokenizer.ggml.pre"] == "bloom"


DAMAGED_TOKENIZERS = dict.fromkeys(("tokens", "merges", "token_type"), (9, (5, [1, 2])))
DAMAGED_TOKENIZERS |= dict.fromkeys(("bos_token_id", "eos_token_id"), (4, 400))
DAMAGED_TOKENIZERS |= {"model": (8, "llama"), "pre": (8, "llama-bpe")}


@pytest.mark.parametrize("key", DAMAGED_TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used_leaves_the_model(tmp_path, key):
    keys = TOKENIZER | {f"tokenizer.ggml.{key}": DAMAGED_TOKENIZERS[key]}
    checkpoint = open_checkpoint(write_gguf_folder(tmp_path, TENSORS, **keys))
    with pytest.raises(CheckpointError, match="give token ids"):
        load_tokenizer(checkpoint)


ONE = {"a": plain(np.arange(64, dtype=np.float32))}
WHOLE = gguf_bytes({"general.name": (8, "x")}, ONE)


def patched(place, data):
    return WHOLE[:place] + data + WHOLE[place + len(data) :]


REFUSED = {
    "version 1": (gguf_bytes({}, ONE, version=1), "of version 1"),
    "big-endian": (patched(4, b"\0\0\0\3"), "big-endian"),
    "split": (gguf_bytes({"split.count": (4, 3)}, ONE), "one of 3 parts"),
    "cut": (WHOLE[:-1], "reaches to byte"),
    "header cut": (WHOLE[:40], "damaged GGUF file"),
    "2^60 tensors": (patched(8, (2**60).to_bytes(8, "little")), "entries where"),
    "a name of 2^63 bytes": (patched(24, (2**63).to_bytes(8, "little")), "entries where"),
    "one key twice": (
        gguf_bytes({"a": (4, 1), "b": (4, 2)}, ONE).replace(b"b\4\0", b"a\4\0"),
        "two of the name 'a'",
    ),
    "a value of type 99": (
        gguf_bytes({"a": (4, 1)}, ONE).replace(b"a\4\0", b"a\x63\0"),
        "a value of type 99",
    ),
    "an alignment of 3": (gguf_bytes({"general.alignment": (4, 3)}, ONE), "an alignment of 3"),
    "9 dimensions": (gguf_bytes({}, {"a": ((1,) * 9, 0, b"1234")}), "9 dimensions"),
    "sizes whose product is 2^64": (gguf_bytes({}, {"a": ((2**32, 2**32), 0, b"1234")}), "reaches to byte"),
    "half a block": (gguf_bytes({}, {"a": ((3, 48), 8, b"1" * 200)}), "no whole blocks of 32"),
    "blocks beyond the end": (gguf_bytes({}, {"a": ((4, 64), 8, b"1" * 200)}), "reaches to byte"),
    "two over one another": (
        gguf_bytes({}, {"a": ONE["a"], "b": ((64,), 0, b"")}).replace(
            b"\0\1\0\0\0\0\0\0" + b"\0" * 8, b"\0" * 16
        ),
        "laid over one another|reaches",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_damaged_or_not_implemented(tmp_path, case):
    data, sentence = REFUSED[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert_refused(path, sentence, re.escape(str(path)))


def test_what_the_gguf_package_writes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gpt2")
    values = np.random.default_rng(3).standard_normal((6, 64), np.float32)
    writer.add_block_count(7)
    writer.add_token_list(["a", "é"])
    kinds = gguf.GGMLQuantizationType
    written = (kinds.F32, kinds.F16, kinds.BF16, kinds.Q8_0, kinds.Q4_0, kinds.Q4_1, kinds.Q5_0, kinds.Q5_1)
    for kind in written:
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    container = read_gguf(tmp_path / "x.gguf")
    assert container.metadata["gpt2.block_count"] == 7
    assert container.metadata["tokenizer.ggml.tokens"] == ["a", "é"]
    assert container.tensors.keys() == {kind.name for kind in written}
    for kind in written:
        theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(container.tensors[kind.name].float32(), theirs, err_msg=kind.name)
