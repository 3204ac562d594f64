"""config.json against transformers' own reading of it, and what is refused by name."""

import json

import numpy as np
import pytest

from support.recorded import needs_transformers
from support.tables import column, rows
from support.tiny_checkpoint import CONFIG
from tinygpt.errors import CheckpointError
from tinygpt.kernels.reference import layers as reference
from tinygpt.weights.checkpoint import model_config as read_config
from tinygpt.weights.config import ACTIVATIONS, ModelConfig
from tinygpt.weights.families.family import Source
from tinygpt.weights.families.settings import config_of_parts
from tinygpt.weights.families.transformers import MODEL_TYPES
from tinygpt.weights.tensor import Container

ACCEPTED = """
{}
{"vocab_size": 50304, "n_positions": 7, "n_embd": 20, "n_head": 4, "n_layer": 3}
{"n_inner": 24}
{"n_inner": null}
{"activation_function": "relu", "layer_norm_epsilon": 0.0025}
{"scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true, "reorder_and_upcast_attn": true}
{"tie_word_embeddings": false}
{"n_ctx": 77}
{"hidden_size": 24}
{"hidden_size": 16, "n_embd": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 9}
{"bos_token_id": null, "eos_token_id": null}
{"eos_token_id": [3, 4]}
{"eos_token_id": []}
{"eos_token_id": 99999}
{"eos_token_id": -1}
{"layer_norm_epsilon": 0.0}
{"pruned_heads": {}, "n_special": 0, "task_specific_params": {"text-generation": {"max_length": 50}}}
"""
COMPARED = """
    vocab_size n_positions n_embd n_layer n_head n_inner activation_function layer_norm_epsilon scale_attn_weights
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn tie_word_embeddings bos_token_id
"""


def as_tuple(token_ids):
    return tuple(token_ids) if isinstance(token_ids, list) else () if token_ids is None else (token_ids,)


@needs_transformers
@pytest.mark.parametrize("fields", column(ACCEPTED), ids=str)
@pytest.mark.parametrize("base", [CONFIG, {"model_type": "gpt2"}], ids=["tiny", "empty"])
def test_fields_mean_what_transformers_means(base, fields):
    from transformers import GPT2Config as Theirs

    values = {**base, **fields}
    ours = read_config(values)
    theirs = Theirs.from_dict(dict(values))
    for name in COMPARED.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.eos_token_ids == as_tuple(theirs.eos_token_id)


@needs_transformers
@pytest.mark.parametrize(
    "generation",
    column("""
null
{}
{"eos_token_id": 5}
{"eos_token_id": [3, 4]}
{"eos_token_id": null}
{"temperature": 0.5}
"""),
    ids=str,
)
def test_generation_config_decides_what_ends_a_text_as_in_transformers(tmp_path, generation):
    from transformers import GenerationConfig
    from transformers import GPT2Config as Theirs

    if generation is None:
        theirs = GenerationConfig.from_model_config(Theirs.from_dict(dict(CONFIG)))
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        theirs = GenerationConfig.from_pretrained(tmp_path)
    assert read_config(CONFIG, generation).eos_token_ids == as_tuple(theirs.eos_token_id)


@needs_transformers
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_names_are_the_functions_of_transformers(name):
    import torch
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    function = reference.ACTIVATIONS[ACTIVATIONS[name]]
    np.testing.assert_allclose(function(x.numpy()), ACT2FN[name](x).numpy(), rtol=0, atol=1e-7)


REFUSED = """
{"model_type": "gptj"}
{"model_type": ["gpt2"]}
{"add_cross_attention": "yes"}
{"quantization_config": {"quant_method": "gptq"}}
{"activation_function": "made_up"}
{"activation_function": ["gelu"]}
{"n_embd": 0}
{"n_embd": 8.0}
{"n_embd": true}
{"n_embd": 1000000000000}
{"n_layer": 1000000000000}
{"n_inner": 0}
{"vocab_size": {}}
{"n_head": 3}
{"n_head": 0}
{"layer_norm_epsilon": "1e-5"}
{"layer_norm_epsilon": -1e-05}
{"layer_norm_epsilon": NaN}
{"scale_attn_weights": 1}
{"tie_word_embeddings": null}
{"eos_token_id": "2"}
{"eos_token_id": [2, null]}
{"bos_token_id": [1]}
"""


@pytest.mark.parametrize("fields", column(REFUSED), ids=str)
def test_impossible_and_unimplemented_fields_are_refused_by_name(fields):
    (name,) = fields
    with pytest.raises(CheckpointError, match=name):
        read_config(CONFIG | fields)


NEO = {"model_type": "gpt_neo", "vocab_size": 61, "hidden_size": 24, "num_heads": 3, "num_layers": 4}
NEO_REFUSED = """
{} | attention_types is .*, kinds of 24 layers, and num_layers is 4
{"attention_types": [[["global", "sparse"], 2]]} | attention_types is .*'sparse'.* of 'global' and 'local'
{"attention_types": [["global", "local"]]} | attention_types is .* and must be a list of kinds
{"attention_types": [[["local"], 1000000000000]]} | attention_types is .* and must be
{"attention_types": [[["local"], -4]]} | attention_types is .* and must be
{"attention_types": {"local": 4}} | attention_types is .* and must be
{"attention_types": [[["local"], 3]]} | attention_types is .*, kinds of 3 layers, and num_layers is 4
{"attention_layers": ["local", "none", "local", "local"]} | attention_layers is .*'none'.* and must be
{"attention_layers": ["local"]} | attention_layers is .*, kinds of 1 layers, and num_layers is 4
{"attention_types": [[["local"], 4]], "attention_layers": ["local", "local", "local", "global"]} | attention_layers is
{"attention_types": [[["local"], 4]], "window_size": 0} | window_size is 0 and must be a whole number from 1
{"attention_types": [[["local"], 4]], "window_size": 2.5} | window_size is 2.5 and must be
{"attention_types": [[["local"], 4]], "activation_function": "made_up"} | activation_function
"""


@pytest.mark.parametrize(("fields", "message"), rows(NEO_REFUSED), ids=str)
def test_kinds_of_attention_that_are_impossible_are_refused_by_name(fields, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(NEO | fields)


@pytest.mark.parametrize(
    ("fields", "local"),
    rows("""
{"attention_types": [[["global", "local"], 2]]} | [1, 3]
{"attention_types": [[["global"], 3], [["local"], 1]]} | [3]
{"attention_layers": ["local", "global", "local", "global"]} | [0, 2]
{"attention_types": [[["local"], 2]], "num_hidden_layers": 2} | [0, 1]
{"attention_types": [[["global"], 4]]} | []
"""),
)
def test_kinds_of_attention(fields, local):
    config = read_config(NEO | fields)
    assert list(config.local_layers) == local
    assert {config.attention(i).scale for i in range(config.n_layer)} == {1.0}
    assert [config.attention(i).window for i in local] == [256] * len(local)
    assert bool(local) == bool(config.structure)


def test_an_architecture_that_is_not_implemented_is_told_those_that_are():
    for name in ("gpt2", *MODEL_TYPES):
        with pytest.raises(CheckpointError, match=f"model_type is 'llama' and must be .*'{name}'"):
            read_config({"model_type": "llama", "n_embd": "what this field means there is not known"})


def test_no_number_of_heads_is_offered(tmp_path):
    """Followed, the wrong one loads."""
    with pytest.raises(CheckpointError, match=r"does not say how many heads .*config.json with n_head\.$"):
        config_of_parts(Source(tmp_path, Container("ONNX", {})), "its graph", seen={"n_embd": 1600})


def test_structure_cannot_be_given_by_the_names_of_our_fields():
    """Of GPT-2, whose files may have any other field."""
    others = {
        "norm_placement": "post",
        "positions": "alibi",
        "embed_norm": True,
        "embed_dim": 3,
        "num_experts": 8,
    }
    assert read_config({**CONFIG, **others}) == read_config(CONFIG)


def test_sizes_and_scales_derived_from_the_fields():
    config = ModelConfig(n_embd=20, n_head=4, scale_attn_by_inverse_layer_idx=True)
    assert (config.head_size, config.inner_size) == (5, 80)
    assert config.attention(2).scale == 5**-0.5 / 3
    assert ModelConfig(n_inner=7, scale_attn_weights=False).inner_size == 7
    assert ModelConfig(scale_attn_weights=False).attention(3).scale == 1.0
