"""convert --to: what others read. Each file is read back here, to the same bits where the format holds float32."""

import json
import math

import numpy as np
import pytest

from support.foreign import WRITERS, nanogpt_state
from support.paths import DEMO
from support.recorded import MISSING
from support.tables import rows
from support.tiny_checkpoint import (
    CONFIG,
    assert_same,
    convert,
    copy_tokenizer,
    gpt2_arrays,
    random_tensors,
    write_checkpoint,
    write_json,
)
from support.torch_files import own_bytes
from tinygpt.cli import main as cli
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.weights.checkpoint import random_checkpoint
from tinygpt.weights.config import ModelConfig, parameter_shapes
from tinygpt.weights.containers.safetensors import read_safetensors
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")
WIDE = ModelConfig(vocab_size=70, n_positions=9, n_embd=64, n_head=2, n_layer=2, n_inner=96, bos_token_id=1)


@pytest.mark.parametrize("to", ["safetensors", "gguf"])
@pytest.mark.parametrize("form", [form for form in WRITERS if form not in ("nanogpt", "nanogpt_legacy")])
def test_every_form_becomes_every_other(tmp_path, form, to):
    """nanoGPT's activation is not llama.cpp's."""
    source = open_checkpoint(WRITERS[form](tmp_path / "source", TENSORS))
    there = open_checkpoint(convert(source.path, tmp_path / "there", "--to", to))
    assert_same(there, source)
    assert there.config.activation == source.config.activation
    assert there.config.layer_norm_epsilon == source.config.layer_norm_epsilon


def test_hugging_faces_layout_and_its_own_files(tmp_path):
    source = write_checkpoint(tmp_path / "source", scale_attn_weights=False, n_ctx=6)
    convert(source, tmp_path / "there", "--to", "safetensors")
    assert (tmp_path / "there" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    container = read_safetensors(tmp_path / "there" / "model.safetensors")
    assert container.metadata == {"format": "pt"}
    assert sorted(container.tensors) == sorted(random_tensors())


@pytest.mark.parametrize("flags", [["--to", "safetensors"], ["--to", "gguf"]])
def test_biases_that_a_model_was_trained_without_are_written(tmp_path, flags):
    """As zeros: no GPT-2 of Hugging Face's or of llama.cpp's lacks them."""
    arrays = {name: array for name, array in TENSORS.items() if not name.endswith("bias")}
    state = nanogpt_state(arrays, bias=False)
    (tmp_path / "ckpt.pt").write_bytes(own_bytes(state))
    write_json(tmp_path / "config.json", {"activation_function": "gelu_new"})
    there = open_checkpoint(convert(tmp_path / "ckpt.pt", tmp_path / "there", *flags))
    for name in parameter_shapes(there.config):
        assert there.tensor(name).any() != name.endswith("bias"), name


def test_transformers_computes_the_same_of_a_foreign_checkpoint(tmp_path):
    torch = pytest.importorskip("torch", reason=MISSING)
    transformers = pytest.importorskip("transformers", reason=MISSING)
    source = WRITERS["nanogpt"](tmp_path / "source", TENSORS)
    convert(source, tmp_path / "there", "--to", "safetensors")
    model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert not any(info.values())
    ours = transformers.GPT2LMHeadModel.from_pretrained(
        write_checkpoint(tmp_path / "hf", activation_function="gelu", bos_token_id=None, eos_token_id=None)
    )
    ids = torch.tensor([[1, 5, 3, 2]])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, ours.eval()(ids).logits, rtol=0, atol=1e-5)


def test_numpys_file(tmp_path):
    source = WRITERS["gguf"](tmp_path / "source", TENSORS)
    convert(source, tmp_path / "there", "--to", "npz")
    with np.load(tmp_path / "there" / "model.npz") as arrays:
        assert sorted(arrays.files) == sorted(random_tensors())
        for name, array in random_tensors().items():
            np.testing.assert_array_equal(arrays[name], array)
    assert json.loads((tmp_path / "there" / "config.json").read_text())["n_embd"] == CONFIG["n_embd"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("to", ["safetensors", "gguf"])
def test_halves_are_rounded_to_even(tmp_path, to, dtype):
    tensors = TENSORS | {"h.0.mlp.c_proj.weight": TENSORS["h.0.mlp.c_proj.weight"].copy()}
    values = tensors["h.0.mlp.c_proj.weight"].reshape(-1)
    values[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20)]
    source = write_checkpoint(
        tmp_path / "source", {f"transformer.{name}": array for name, array in tensors.items()}
    )
    convert(source, tmp_path / "there", "--to", to, "--dtype", dtype)
    there = open_checkpoint(tmp_path / "there").tensor("h.0.mlp.c_proj.weight").T.reshape(-1)
    if dtype == "float16":
        np.testing.assert_array_equal(there, values.astype(np.float16).astype(np.float32))
    else:
        assert there[:3].tolist() == [1, 1 + 2**-6, -(1 + 2**-7)]
        np.testing.assert_allclose(there, values, rtol=2**-8)


def wide(folder, **fields):
    arrays = gpt2_arrays(random_checkpoint("random", WIDE))
    names = ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer", "n_inner")
    sizes = {name: getattr(WIDE, name) for name in names}
    return write_checkpoint(
        folder, {f"transformer.{name}": array for name, array in arrays.items()}, **sizes, **fields
    )


@pytest.mark.parametrize(("dtype", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_blocks_are_those_of_the_gguf_package(tmp_path, dtype, kind):
    import gguf

    source = open_checkpoint(wide(tmp_path / "source"))
    convert(source.path, tmp_path / "there", "--to", "gguf", "--dtype", dtype)
    reader = gguf.GGUFReader(tmp_path / "there" / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for theirs, ours in (
        ("blk.1.attn_qkv.weight", "h.1.attn.c_attn.weight"),
        ("token_embd.weight", "wte.weight"),
    ):
        assert tensors[theirs].tensor_type.name == kind
        blocks = gguf.quants.quantize(
            np.ascontiguousarray(source.tensor(ours)), gguf.GGMLQuantizationType[kind]
        )
        np.testing.assert_array_equal(tensors[theirs].data, blocks)
    for name in ("position_embd.weight", "blk.0.attn_norm.bias", "blk.0.attn_qkv.bias", "output_norm.weight"):
        assert tensors[name].tensor_type.name == "F32"
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.file_type"] == {"int8": 7, "int4": 2}[dtype]
    assert fields["gpt2.attention.head_count"] == 2


def test_the_tokenizer_goes_along(tmp_path):
    convert(DEMO, tmp_path / "there", "--to", "gguf")
    for path in (tmp_path / "there", tmp_path / "there" / "model.gguf"):
        checkpoint = open_checkpoint(path)
        ours = load_tokenizer(checkpoint)
        theirs = load_tokenizer(open_checkpoint("demo"))
        text = "Once upon a time, <|endoftext|> Ångström's 12"
        assert ours.encode(text) == theirs.encode(text)
        assert ours.special_ids == theirs.special_ids
    assert checkpoint.read_tokenizer().cuts == "gpt-2"
    (tmp_path / "alone").mkdir()
    moved = (tmp_path / "there" / "model.gguf").rename(tmp_path / "alone" / "x.gguf")
    convert(moved, tmp_path / "back", "--to", "safetensors")
    back = load_tokenizer(open_checkpoint(tmp_path / "back"))
    assert back.encode(text) == theirs.encode(text)
    assert back.eos_token_id == theirs.eos_token_id


def test_a_padded_vocabulary_has_a_token_for_each_row(tmp_path):
    arrays = random_tensors() | {"transformer.wte.weight": np.ones((8200, 8), np.float32)}
    source = write_checkpoint(tmp_path / "source", arrays, vocab_size=8200)
    convert(copy_tokenizer(source), tmp_path / "there", "--to", "gguf")
    from tinygpt.weights.containers.gguf import read_gguf

    metadata = read_gguf(tmp_path / "there" / "model.gguf").metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == 8200
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD8199]"
    assert metadata["tokenizer.ggml.token_type"][-1] == 5


def test_scaling_that_llama_cpp_does_not_know_goes_into_the_queries(tmp_path):
    source = open_checkpoint(
        wide(tmp_path / "source", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    )
    convert(source.path, tmp_path / "there", "--to", "gguf")
    there = open_checkpoint(tmp_path / "there" / "model.gguf")
    for layer in (0, 1):
        name = f"h.{layer}.attn.c_attn.weight"
        factor = np.float32(math.sqrt(32) / (layer + 1))
        np.testing.assert_array_equal(there.tensor(name)[:64], source.tensor(name)[:64] * factor)
        np.testing.assert_array_equal(there.tensor(name)[64:], source.tensor(name)[64:])


REFUSED = rows("""
--to gguf | {"activation_function": "gelu"} | llama.cpp computes gelu_new
--to gguf --dtype int8 | {} | no whole blocks of 32
--to safetensors --dtype int8 | {} | must be one of float32, float16, bfloat16.
--to npz --dtype bfloat16 | {} | must be one of float32, float16.
--dtype float64 | {} | must be one of float32, float16, bfloat16, int8, int4.
--to gguf --smooth 0.5 | {} | is for tinygpt's own format
""")


@pytest.mark.parametrize(("flags", "fields", "sentence"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_before_any_work(tmp_path, capsys, flags, fields, sentence):
    source = write_checkpoint(tmp_path / "source", **fields)
    assert cli.main(["convert", str(source), str(tmp_path / "there"), *flags.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "there").exists()
