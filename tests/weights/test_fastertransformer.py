"""FasterTransformer's folders: parameters, settings, refusals, and tables of soft prompts."""

from pathlib import Path

import numpy as np
import pytest

from support.family_models import T, write_family
from support.foreign import fastertransformer
from support.megatron_writer import tar_bytes
from support.moe_models import EXPERT_LAYERS, E, F, ft_moe, moe_arrays
from support.tables import rows
from support.tiny_checkpoint import (
    assert_holds,
    assert_refused,
    assert_same,
    assert_same_files,
    convert,
    gpt2_arrays,
    random_tensors,
)
from support.torch_files import torch_bytes
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.peft import read_soft_prompt
from tinygpt.weights.config import HEAD, ModelConfig
from tinygpt.weights.families.family import Source
from tinygpt.weights.families.fastertransformer import _settings, _structure
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.tensor import Container

TENSORS = random_tensors(prefix="")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_folder_for_any_number_of_gpus(tmp_path, gpus):
    checkpoint = open_checkpoint(fastertransformer(tmp_path, TENSORS, gpus))
    assert_holds(checkpoint, TENSORS)
    config = checkpoint.config
    assert (config.bos_token_id, config.eos_token_ids, config.activation) == (1, (2,), "gelu_tanh")
    assert checkpoint.tied


def test_a_head_of_its_own_soft_prompts_and_copies_for_int8(tmp_path):
    fastertransformer(tmp_path, TENSORS | {HEAD: TENSORS["wte.weight"] + 1})
    for name in ("weight.int8.0", "scale", "scale_inter", "scale_out"):
        (tmp_path / f"model.layers.0.attention.dense.{name}.bin").write_bytes(b"\0" * 64)
    (tmp_path / "model.prompt_table.mine.weight.bin").write_bytes(b"\0" * 64)
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), TENSORS["wte.weight"] + 1)
    assert len(checkpoint.ignored) == 5


# As the converters for OPT and for BLOOM write them.
OPT = {"activation_type": "Relu", "layernorm_eps": "1e-5", "has_post_decoder_layernorm": "1"}
OPT_350M = OPT | {"layernorm_type": "post_layernorm", "has_post_decoder_layernorm": "0"}
BLOOM = {
    "model_variant": "bloom-pre",
    "has_positional_encoding": "False",
    "has_pre_decoder_layernorm": "True",
    "use_attention_linear_bias": "True",
    "has_post_decoder_layernorm": "True",
}


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
    assert checkpoint.config.activation == config.activation
    assert checkpoint.config.n_positions == (6 if config.has_alibi else T)  # what the files say
    assert checkpoint.tied
    assert_same(checkpoint, expected)


# As its guide has it for bloom-560m.
BLOOM_CONFIG = """[ft_instance_hyperparameter]
model_name=bloom_560M
int8_mode=1

[bloom_560M]
head_num=6
size_per_head=5
vocab_size=61
decoder_layers=2
start_id=1
end_id=2
inter_size=120
model_variant=bloom ; define variant structure
"""


def test_a_variant_of_the_guide_and_what_int8_mode_becomes(tmp_path):
    expected = open_checkpoint(write_family(tmp_path / "source", "bloom-6"))
    there = fastertransformer(tmp_path / "there", gpt2_arrays(expected), 3)
    (there / "config.ini").write_text(BLOOM_CONFIG)
    checkpoint = open_checkpoint(there)
    assert checkpoint.family == "BLOOM of FasterTransformer"
    assert checkpoint.quirks == (
        "int8_mode is 1: the float weights are read, and --dtype int8 makes int8 of them",
    )
    assert_same(checkpoint, expected)


def test_a_bloom_becomes_hugging_faces(tmp_path):
    source = open_checkpoint(write_family(tmp_path / "source", "bloom-6"))
    sizes = {"head_num": 6, "size_per_head": 5, "max_pos_seq_len": T}
    there = fastertransformer(tmp_path / "there", gpt2_arrays(source), **BLOOM, **sizes)
    assert_same_files(convert(there, tmp_path / "back", "--to", "safetensors"), source.path)


# The last has an output norm in its files, which the settings deny.
REFUSED = rows(r"""
{"has_positional_encoding": "0"} | has_positional_encoding is '0'; use_attention_linear_bias is 'false'
{"use_attention_linear_bias": "1"} | has_positional_encoding is '1'; use_attention_linear_bias is '1'
{"layernorm_type": "t5_layernorm"} | layernorm_type
{"has_positional_encoding": "2"} | has_positional_encoding
{"has_pre_decoder_layernorm": "x"} | has_pre_decoder_layernorm
{"gpt_with_moe": "2"} | gpt_with_moe is '2'
{"model_variant": "gpt-j"} | model_variant 'gpt-j', which must be one of opt-pre, opt-post, bloom-pre, gpt, bloom
{"activation_type": "Swiglu"} | activation_function
{"head_num": "0"} | head_num
{"size_per_head": "x"} | size_per_head
{"weight_data_type": "fp8"} | weight_data_type
{"num_layer": "10000000"} | n_layer
{"layernorm_eps": "nan"} | layer_norm_epsilon
{"has_post_decoder_layernorm": false} | unexpected: model\.final_layernorm\.bias; model
""")
MIXED = (
    BLOOM | {"layernorm_type": "post_layernorm"},
    "layernorm_type is 'post_layernorm'; use_attention_linear_bias",
)


@pytest.mark.parametrize(("settings", "named"), [MIXED, *REFUSED])
def test_settings_that_are_impossible_or_not_implemented_are_named(tmp_path, settings, named):
    assert_refused(fastertransformer(tmp_path, TENSORS, **settings), named)


@pytest.mark.parametrize(
    "text", ["", "head_num = 1", "[gpt]\n[gpt]", "[gpt\n", "[gpt]\nhead_num = 2\nhead_num = 3"]
)
def test_a_config_ini_that_is_damaged(tmp_path, text):
    fastertransformer(tmp_path, TENSORS)
    (tmp_path / "config.ini").write_text(text)
    assert_refused(tmp_path)


@pytest.mark.parametrize(
    "text", ["a" + " " * 1000 + "b", "[gpt]\na" + "\f\u2028" * 500 + "b", "#" * 99 + "\n" * 99_999]
)
def test_a_config_ini_whose_lines_or_text_have_no_end(tmp_path, text):
    fastertransformer(tmp_path, TENSORS)
    (tmp_path / "config.ini").write_text(text)
    assert_refused(tmp_path, "more than 100000 characters, or 1000 in a line")


GPT_CONFIG = """[ft_instance_hyperparameter]
data_type=fp16
model_name=mine ; one of those below

[gpt_124M]
head_num=12
size_per_head=64
decoder_layers=12

[mine]
head_num=2 ; heads
size_per_head=4
vocab_size=11
decoder_layers=2
start_id=1
end_id=2
inter_size=20
"""


def test_gpt_config_ini_in_the_place_of_config_ini(tmp_path):
    fastertransformer(tmp_path, TENSORS)
    (tmp_path / "config.ini").unlink()
    assert_refused(tmp_path, r"FasterTransformer's tensors without their config\.ini.*gpt_config\.ini")
    (tmp_path / "config.ini").write_text(GPT_CONFIG)
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, TENSORS)
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_ids) == (1, (2,))
    (tmp_path / "config.ini").write_text(GPT_CONFIG.replace("decoder_layers=2", "decoder_layers=3"))
    assert_refused(tmp_path, r"missing: model\.layers\.2\.")


@pytest.mark.parametrize(
    ("variant", "settings"), [("opt-pre", OPT), ("opt-post", OPT_350M), ("bloom-pre", BLOOM)]
)
def test_a_model_variant_stands_for_its_settings(variant, settings):
    def source(fields):
        return Source(Path("x"), Container("", {}, {"gpt": {"head_num": "2", **fields}}))

    first, second = (_settings(source(fields)) for fields in ({"model_variant": variant}, settings))
    assert _structure(source({}), first) == _structure(source({}), second)
    assert first.get("activation_type", "gelu").lower() == second.get("activation_type", "gelu").lower()


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_experts(tmp_path, gpus):
    arrays = moe_arrays() | {f"h.1.mlp.experts.{e}.c_proj.bias": np.full(24, e, np.float32) for e in range(E)}
    checkpoint = open_checkpoint(ft_moe(tmp_path, arrays, gpus))
    assert_holds(checkpoint, arrays)
    config = checkpoint.config
    assert (config.expert_layers, config.num_experts, config.inner_size) == (EXPERT_LAYERS, E, F)
    assert (config.experts_per_token, config.norm_topk_prob) == (1, False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"expert_num": 4}, r"gates of \[5\.0\] experts: correct moe_layers and expert_num"),
        ({"expert_num": "5.0"}, r"gates of \[5\.0\] experts"),
        ({"moe_layers": "[]"}, r"gates of \[\] experts"),
        ({"moe_layers": "[1, 2]"}, r"holds no tensor model\.layers\.2\.mlp\.moe\.gate\.wg\.weight"),
        ({"moe_layers": "[1]"}, r"missing: model\.layers\.3\.mlp\.dense_h_to_4h"),
        ({"num_layer": 3}, "unexpected: .*layers.3"),
    ],
)
def test_experts_that_settings_deny(tmp_path, settings, said):
    assert_refused(ft_moe(tmp_path, moe_arrays(), **settings), said)


def test_experts_in_a_file_that_is_cut(tmp_path):
    path = ft_moe(tmp_path, moe_arrays()) / "model.layers.1.mlp.moe.experts.dense_4h_to_h.bias.bin"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-4])
    assert_refused(tmp_path, r"experts\.0\.dense_4h_to_h\.bias is \(119,\) and config\.ini asks for \(24,\)")


def test_files_that_are_cut_lost_or_too_many(tmp_path):
    path = fastertransformer(tmp_path, TENSORS) / "model.layers.0.attention.dense.weight.0.bin"
    whole = path.read_bytes()
    cuts = {1: "no whole float32", 4: r"is \(63,\) and config\.ini asks for \(64,\)"}
    for size, sentence in cuts.items():
        path.unlink()
        path.write_bytes(whole[:-size])
        assert_refused(tmp_path, sentence)
    path.unlink()
    assert_refused(tmp_path, r"missing: model\.layers\.0\.attention\.dense\.weight")
    path.write_bytes(whole)
    (tmp_path / "model.odd.bin").write_bytes(b"1234")
    assert_refused(tmp_path, r"unexpected: model\.odd")


# Soft prompts of NeMo's p-tuning, and as FasterTransformer's converter writes them.

CONFIG = ModelConfig(vocab_size=23, n_positions=16, n_embd=8, n_layer=3, n_head=2)
ROWS = {"sentiment": 5, "squad": 7, "spread": 3}
TABLES = {
    task: np.random.default_rng(rows).standard_normal((rows, 8), np.float32) for task, rows in ROWS.items()
}
SETTINGS = """\
task_templates:
- {taskname: sentiment, total_virtual_tokens: 5, virtual_token_splits: [5], prompt_template: <|VIRTUAL_PROMPT_0|> {x}}
- {taskname: squad, total_virtual_tokens: 7, virtual_token_splits: [7]}
- {taskname: spread, total_virtual_tokens: 3, virtual_token_splits: [1, 2]}
""".replace("{x}", "text")
# What prompt_convert of nemo_ckpt_convert.py (NVIDIA/FasterTransformer df4a7534) added to a model's config.ini.
CONFIG_INI = """\
[gpt]
head_num = 2
weight_data_type = fp16
num_tasks = 2
prompt_learning_start_id = 50257
prompt_learning_type = 3

[task_0]
task_name = sentiment
prompt_length = 5

[task_1]
task_name = squad
prompt_length = 7

"""


def write_nemo(folder: Path, *tasks: str, dtype: str = "float32", is_nested: bool = True) -> Path:
    """As MegatronBasePromptLearningModel.state_dict and PromptTable have it, before 2022's change without nesting."""
    table = {f"prompt_table.{task}.prompt_embeddings.weight": TABLES[task].astype(dtype) for task in tasks}
    table |= {f"prompt_table.{task}.indices": np.arange(ROWS[task]) for task in tasks}
    state = (
        {"prompt_table": table} if is_nested else {f"prompt_table.{name}": one for name, one in table.items()}
    )
    members = {"./model_config.yaml": SETTINGS.encode(), "./model_weights.ckpt": torch_bytes(state)}
    (folder / "tuned.nemo").write_bytes(tar_bytes(members))
    return folder / "tuned.nemo"


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nemo(tmp_path, dtype, is_nested):
    path = write_nemo(tmp_path, "sentiment", "squad", dtype=dtype, is_nested=is_nested)
    for task in ("sentiment", "squad"):
        prompt = read_soft_prompt(path, CONFIG, task)
        assert (prompt.kind, prompt.embeds.dtype) == ("prompt", np.float32)
        np.testing.assert_array_equal(prompt.embeds, TABLES[task].astype(dtype))
    one = read_soft_prompt(write_nemo(tmp_path, "squad"), CONFIG, "any name")
    np.testing.assert_array_equal(one.embeds, TABLES["squad"])


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        (("sentiment", "squad"), "holds prompts of sentiment, squad: name the soft prompt so"),
        ((), "holds prompts of no task"),
        (("spread",), "cuts spread into 2 places of a text"),
    ],
)
def test_a_nemo_without_the_task_before_a_text_is_refused(tmp_path, tasks, says):
    with pytest.raises(CheckpointError, match=says):
        read_soft_prompt(write_nemo(tmp_path, *tasks), CONFIG, "mine")


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # whatever weight_data_type says
def test_fastertransformers_prompt_table(tmp_path, dtype):
    (tmp_path / "config.ini").write_text(CONFIG_INI)
    path = tmp_path / "model.prompt_table.squad.weight.bin"
    TABLES["squad"].astype(dtype).tofile(path)
    np.testing.assert_array_equal(read_soft_prompt(path, CONFIG).embeds, TABLES["squad"].astype(dtype))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="prompt_length is '7', and it must hold as many rows of 8"):
        read_soft_prompt(path, CONFIG)
    with pytest.raises(CheckpointError, match="prompt_length is '', and it must hold"):
        read_soft_prompt(path.rename(tmp_path / "model.prompt_table.other.weight.bin"), CONFIG)
