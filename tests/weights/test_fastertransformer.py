"""FasterTransformer's folders, and what its converters have got wrong: each is right here."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.family_models import T, write_family
from support.foreign import fastertransformer
from support.megatron_writer import Form, megatron, rank_file
from support.processes import Result
from support.tiny_checkpoint import assert_holds, gpt2_arrays, random_tensors, write_checkpoint
from support.torch_files import own_bytes
from tinygpt.errors import CheckpointError
from tinygpt.weights.config import HEAD, parameter_shapes
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_folder_for_any_number_of_gpus(tmp_path, gpus):
    checkpoint = open_checkpoint(fastertransformer(tmp_path, TENSORS, gpus))
    assert_holds(checkpoint, TENSORS)
    config = checkpoint.config
    assert (config.bos_token_id, config.eos_token_ids, config.activation) == (1, (2,), "gelu_tanh")
    assert checkpoint.tied


def test_a_head_of_its_own_and_copies_for_int8(tmp_path):
    fastertransformer(tmp_path, TENSORS | {HEAD: TENSORS["wte.weight"] + 1})
    for name in ("weight.int8.0", "scale", "scale_inter", "scale_out"):
        (tmp_path / f"model.layers.0.attention.dense.{name}.bin").write_bytes(b"\0" * 64)
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), TENSORS["wte.weight"] + 1)
    assert len(checkpoint.ignored) == 4


# As the converters for OPT and for BLOOM write them.
OPT = {"activation_type": "Relu", "layernorm_eps": "1e-5", "has_post_decoder_layernorm": "1"}
OPT_350M = OPT | {"layernorm_type": "post_layernorm", "has_post_decoder_layernorm": "0"}
BLOOM = {"model_variant": "bloom-pre", "has_positional_encoding": "False", "has_pre_decoder_layernorm": "True"}
BLOOM |= {"use_attention_linear_bias": "True", "has_post_decoder_layernorm": "True"}


@pytest.mark.parametrize(
    ("name", "settings", "gpus"), [("opt", OPT, 1), ("opt-post-norm", OPT_350M, 1), ("bloom-6", BLOOM, 3)]
)
def test_other_families(tmp_path, name, settings, gpus):
    """The converter for OPT writes a head that is a copy."""
    expected = open_checkpoint(write_family(tmp_path / "source", name))
    config = expected.config
    arrays = gpt2_arrays(expected)
    arrays |= {HEAD: arrays["wte.weight"]} if name != "bloom-6" else {}
    sizes = {"head_num": config.n_head, "size_per_head": config.head_size, "num_layer": config.n_layer}
    checkpoint = open_checkpoint(fastertransformer(tmp_path / "there", arrays, gpus, **{**settings, **sizes}))
    assert checkpoint.config.structure == config.structure
    assert (checkpoint.config.activation, checkpoint.config.n_positions) == (
        config.activation,
        6 if config.has_alibi else T,  # what the files say
    )
    assert checkpoint.tied
    for parameter in parameter_shapes(config):
        np.testing.assert_array_equal(checkpoint.tensor(parameter), expected.tensor(parameter), err_msg=parameter)


def test_a_bloom_becomes_hugging_faces(tmp_path, capsys):
    source = open_checkpoint(write_family(tmp_path / "source", "bloom-6"))
    there = fastertransformer(
        tmp_path / "there", gpt2_arrays(source), **BLOOM, head_num=6, size_per_head=5, max_pos_seq_len=T
    )
    assert Result(capsys, "convert", [str(there), str(tmp_path / "back"), "--to", "safetensors"]).code == 0
    back, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source.path))
    assert back.keys() == first.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (BLOOM | {"layernorm_type": "post_layernorm"}, "layernorm_type is 'post_layernorm'; use_attention_linear_bias"),
        ({"has_positional_encoding": "0"}, "has_positional_encoding is '0'; use_attention_linear_bias is 'false'"),
        ({"use_attention_linear_bias": "1"}, "has_positional_encoding is '1'; use_attention_linear_bias is '1'"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, settings, named):
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(fastertransformer(tmp_path, TENSORS, **settings))


SETTINGS = {
    "layernorm_type": "t5_layernorm",
    "has_positional_encoding": "2",
    "has_pre_decoder_layernorm": "x",
    "gpt_with_moe": "1",
    "activation_type": "Swiglu",
    "head_num": "0",
    "size_per_head": "x",
    "weight_data_type": "fp8",
    "num_layer": "10000000",
    "layernorm_eps": "nan",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_impossible_or_not_implemented_are_named(tmp_path, name):
    named = {"activation_type": "activation_function", "num_layer": "n_layer", "layernorm_eps": "layer_norm_epsilon"}
    with pytest.raises(CheckpointError, match=named.get(name, name)):
        open_checkpoint(fastertransformer(tmp_path, TENSORS, **{name: SETTINGS[name]}))


@pytest.mark.parametrize("text", ["", "head_num = 1", "[gpt]\n[gpt]", "[gpt\n", "[gpt]\nhead_num = 2\nhead_num = 3"])
def test_a_config_ini_that_is_damaged(tmp_path, text):
    fastertransformer(tmp_path, TENSORS)
    (tmp_path / "config.ini").write_text(text)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_files_that_are_cut_lost_or_too_many(tmp_path):
    path = fastertransformer(tmp_path, TENSORS) / "model.layers.0.attention.dense.weight.0.bin"
    whole = path.read_bytes()
    for data, sentence in (
        (whole[:-1], "no whole float32"),
        (whole[:-4], r"is \(63,\) and config\.ini asks for \(64,\)"),
    ):
        path.unlink()
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=sentence):
            open_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.attention\.dense\.weight"):
        open_checkpoint(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "model.odd.bin").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"unexpected: model\.odd"):
        open_checkpoint(tmp_path)


# Where its converters (examples/pytorch/gpt/utils) go wrong, in silence or by an error. What else they do is told apart
# or refused elsewhere: OPT with its norms on either side and BLOOM's residual from behind its layer norm above, numbers
# of experts that differ and stages of a pipeline in test_experts.py, the ids that end a BLOOM in test_model_types.py.


def open_megatron(folder, **fields):
    settings = fields.pop("settings", {})
    return open_checkpoint(megatron(folder, TENSORS, Form(**fields), **settings))


@pytest.mark.parametrize("version", [1, 2])
def test_1_versions_1_and_2_of_megatron_are_brought_into_order(tmp_path, version):
    """It does so with version 3 alone."""
    assert_holds(open_megatron(tmp_path, version=version), TENSORS)


def test_7_heads_that_are_not_tied(tmp_path):
    """It drops them, of Megatron's checkpoints as of Hugging Face's, which it loads without their heads."""
    state = rank_file(TENSORS, Form(), untie_embeddings_and_output_weights=True)
    state["model"]["language_model.output_layer.weight"] = TENSORS["wte.weight"] + 1
    (tmp_path / "model_optim_rng.pt").write_bytes(own_bytes(state))
    for checkpoint in (
        open_checkpoint(tmp_path),
        open_checkpoint(
            write_checkpoint(
                tmp_path / "hf",
                {f"transformer.{n}": a for n, a in TENSORS.items()} | {HEAD: TENSORS["wte.weight"] + 1},
                tie_word_embeddings=False,
            )
        ),
    ):
        np.testing.assert_array_equal(checkpoint.tensor(HEAD), TENSORS["wte.weight"] + 1)
        assert not checkpoint.tied


def test_10_a_last_layer_norm_is_not_lost(tmp_path):
    """Its C++ turns that off for a name of a model, against its own guide: here it is asked for where it is there."""
    fastertransformer(tmp_path, TENSORS, has_post_decoder_layernorm=False)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.final_layernorm\.bias; model"):
        open_checkpoint(tmp_path)
