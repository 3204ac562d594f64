"""Other families that transformers has: names and layouts, what is refused, and the way back to transformers."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.family_models import FAMILY_MODELS, write_family
from support.processes import Result
from support.recorded import MISSING
from support.tiny_checkpoint import assert_refused
from tinygpt.weights.checkpoint import read_config
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.open import open_checkpoint

FAMILIES = {
    "opt": "OPT",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "openai-gpt": "GPT-1",
    "xglm": "XGLM",
    "biogpt": "BioGPT",
}


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_safetensors_of_a_family_are_written_as_they_were(name, tmp_path, capsys):
    """The same tensors to the last bit: transformers computes the same logits."""
    source = write_family(tmp_path / "source", name)
    assert (
        Result(capsys, "convert", [str(source), str(tmp_path / "written"), "--to", "safetensors"]).code == 0
    )
    there, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "written"))
    assert there.keys() == back.keys()
    for key, array in there.items():
        skipped = 2 if key.endswith("embed_positions.weight") else 0  # rows of no position
        np.testing.assert_array_equal(back[key][skipped:], array[skipped:], err_msg=key)
    assert json.loads((tmp_path / "written" / "config.json").read_text()) == FAMILY_MODELS[name]


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("opt", ("", "decoder.", "model.decoder.", "module.model.decoder.", "_orig_mod.model.decoder.")),
        ("bloom-6", ("", "transformer.", "module.transformer.")),
        ("mpt-6", ("", "transformer.")),
        ("gpt-1", ("", "transformer.")),
        ("xglm", ("", "model.", "module.model.")),
        ("biogpt", ("", "biogpt.", "_orig_mod.biogpt.")),
    ],
)
def test_any_wrapper(name, prefixes, tmp_path):
    folders = (write_family(tmp_path / str(i), name, prefix) for i, prefix in enumerate(prefixes))
    first, *others = map(open_checkpoint, folders)
    assert first.family == FAMILIES[FAMILY_MODELS[name]["model_type"]]
    for other in others:
        for key in first.stored:
            np.testing.assert_array_equal(first.tensor(key), other.tensor(key))


@pytest.mark.parametrize("name", ["opt", "bloom-6", "mpt-6", "gpt-1", "xglm", "biogpt"])
def test_what_is_missing_and_what_is_too_much_are_named_as_the_files_have_it(name, tmp_path):
    folder = write_family(tmp_path, name)
    tensors = load_file(folder / "model.safetensors")
    gone = next(
        key for key in tensors if key.endswith(("fc1.weight", "4h.weight", "up_proj.weight", "c_fc.weight"))
    )
    del tensors[gone]
    tensors["stranger.weight"] = np.zeros(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_refused(folder, gone.split(".", 2)[-1].split(".", 1)[-1], "stranger.weight")


def test_biases_that_config_json_denies_are_refused(tmp_path):
    """transformers would leave them out."""
    folder = write_family(tmp_path, "opt")
    (folder / "config.json").write_text(json.dumps({**FAMILY_MODELS["opt"], "enable_bias": False}))
    assert_refused(folder, r"unexpected: .*q_proj\.bias")


REFUSED = [
    (
        "bloom-4",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm is True",
    ),
    ("mpt-4", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv is 6"),
    ("mpt-4", {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max is 16"),
    ("mpt-4", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is True"),
    ("mpt-4", {"attn_config": {"alibi": False}}, "attn_config.alibi is False"),
    ("mpt-4", {"attn_config": {"softmax_scale": 0.5}}, "attn_config.softmax_scale is 0.5"),
    ("mpt-4", {"no_bias": False}, "no_bias is False"),
    ("gpt-1", {"afn": "relu6"}, "afn is 'relu6'"),
    ("gpt-1", {"n_head": 5}, "cannot be divided into 5 heads"),
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0"),
    ("opt", {"do_layer_norm_before": "no"}, "do_layer_norm_before is 'no'"),
    ("opt", {"activation_function": "gelu_10"}, "activation_function is 'gelu_10'"),
    ("opt", {"hidden_size": [1]}, r"n_embd is \[1\]"),
    ("xglm", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("xglm", {"scale_embedding": 2}, "scale_embedding is 2"),
    ("xglm", {"d_model": 3}, "d_model is 3 and must be a whole number from 4 to"),
    ("xglm", {"max_position_embeddings": 2**20}, "max_position_embeddings is 1048576 and must be"),
    ("xglm", {"pad_token_id": "x"}, "pad_token_id is 'x'"),
    ("biogpt", {"scale_embedding": None}, "scale_embedding is None"),
    ("biogpt", {"hidden_act": "gelu_10"}, "activation_function is 'gelu_10'"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name, fields, message, tmp_path):
    folder = write_family(tmp_path, name)
    (folder / "config.json").write_text(json.dumps({**FAMILY_MODELS[name], **fields}))
    assert_refused(folder, message)


OPT_350M = {"model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
OPT_350M |= {"do_layer_norm_before": False, "word_embed_proj_dim": 512, "prefix": "</s>", "layerdrop": 0.0}
BLOOM_560M = {
    "model_type": "bloom",
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
}
BLOOM_560M |= {"pretraining_tp": 1, "slow_but_exact": False, "attention_softmax_in_fp32": True}
GPT1 = {"model_type": "openai-gpt", "afn": "gelu", "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12}


@pytest.mark.parametrize(
    ("fields", "structure", "n_positions", "ends"),
    [
        (OPT_350M, {"norm_placement": "post", "final_norm": False, "embed_dim": 512}, 2048, (2, (2,))),
        (BLOOM_560M, {"positions": "alibi", "embed_norm": True}, 2048, (1, (2,))),
        (GPT1, {"norm_placement": "post", "final_norm": False}, 512, (None, ())),
        ({"model_type": "opt"}, {}, 2048, (2, (2,))),
        ({"model_type": "mpt"}, {"positions": "alibi"}, 2048, (None, ())),
        ({"model_type": "xglm"}, {"embed_scale": 32.0}, 2048, (0, (2,))),
        ({"model_type": "biogpt", "layer_norm_eps": 1e-12}, {"embed_scale": 32.0}, 1024, (0, (2,))),
    ],
)
def test_published_configurations(fields, structure, n_positions, ends, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert config.layer_norm_epsilon == 1e-5
    assert config.structure == structure
    assert (config.n_positions, (config.bos_token_id, config.eos_token_ids)) == (n_positions, ends)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 14, 112])
def test_slopes_are_those_of_the_paper_and_of_its_rule_for_other_numbers_of_heads(heads):
    slopes = ModelConfig(n_embd=heads, n_head=heads, positions="alibi").alibi_slopes
    power = 2 ** int(np.log2(heads))
    assert slopes[:power] == tuple(2.0 ** (-8 / power * (head + 1)) for head in range(power))
    twice = tuple(2.0 ** (-8 / (2 * power) * (head + 1)) for head in range(2 * power))
    assert slopes[power:] == twice[0::2][: heads - power]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("opt", "has the activation relu, and llama.cpp computes gelu_new for every GPT-2 and BLOOM"),
        *(
            (name, "and GGUF files are written of GPT-2 and BLOOM alone")
            for name in ("mpt-4", "gpt-1", "xglm")
        ),
    ],
)
def test_gguf_is_of_gpt2_and_bloom_alone(name, sentence, tmp_path, capsys):
    source = write_family(tmp_path / "source", name)
    result = Result(capsys, "convert", [str(source), str(tmp_path / "gguf"), "--to", "gguf"])
    assert result.code == 2
    assert sentence in result.err
    assert not (tmp_path / "gguf").exists()


@pytest.mark.parametrize("width", [24, 35])
def test_sinusoids_are_those_of_transformers(width, tmp_path):
    """In all of the 2048 rows of the published models, whose angles are as large as float32 tells them apart."""
    pytest.importorskip("transformers", reason=MISSING)
    from transformers.models.xglm import modeling_xglm

    theirs = modeling_xglm.XGLMSinusoidalPositionalEmbedding(2048, width, 7).weights[2:].numpy()
    sizes = {"d_model": width, "attention_heads": 1, "max_position_embeddings": 2048, "pad_token_id": 7}
    ours = open_checkpoint(write_family(tmp_path, "xglm", **sizes)).tensor("wpe.weight")
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=3e-4
    )  # an angle of 2048 has 1.2e-4 between two float32s
    assert np.abs(ours - theirs).mean() < 1e-6
