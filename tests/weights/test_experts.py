"""Files of DeepSpeed: a folder of ranks and experts."""

import shutil

import numpy as np
import pytest

from support.moe_models import EXPERT_LAYERS, E, F, moe_arrays, write_moe
from support.tiny_checkpoint import assert_holds, assert_refused
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.open import open_checkpoint


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("in_folders", [False, True], ids=["files", "folders"])
def test_every_parameter(tp, in_folders, tmp_path):
    """Cut for any number of GPUs that its heads and MLPs can be."""
    arrays = moe_arrays()
    checkpoint = open_checkpoint(write_moe(tmp_path, arrays, tp, in_folders))
    config = checkpoint.config
    assert checkpoint.family == "Megatron-LM GPT with experts"
    assert (config.expert_layers, config.num_experts, config.inner_size) == (EXPERT_LAYERS, E, F)
    assert_holds(checkpoint, arrays)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "model_rng.pt"])
def test_experts_beside_files_of_megatrons_names(name, tmp_path):
    write_moe(tmp_path, moe_arrays(), tp=2, in_folders=True)
    for file in tmp_path.glob("mp_rank_*/model_states.pt"):
        file.rename(file.with_name(name))
    assert open_checkpoint(tmp_path).config.num_experts == E


@pytest.mark.parametrize(("topk", "is_scaled"), [(1, False), (2, True)])
def test_weights_of_several_experts_sum_to_1(topk, is_scaled, tmp_path):
    config = open_checkpoint(write_moe(tmp_path, moe_arrays(), topk=topk)).config
    assert (config.experts_per_token, config.norm_topk_prob) == (topk, is_scaled)


def test_the_latest_of_several_steps(tmp_path):
    write_moe(tmp_path / "global_step7", moe_arrays())
    (tmp_path / "latest").write_text("global_step7\n")
    assert open_checkpoint(tmp_path).config.num_experts == E
    (tmp_path / "latest").write_text("../elsewhere")
    assert_refused(tmp_path, "latest names no folder beside it")


def test_biases_that_were_never_added_are_left_out(tmp_path):
    arrays = moe_arrays()
    name = "h.1.mlp.experts.2.c_proj.bias"
    checkpoint = open_checkpoint(write_moe(tmp_path, arrays | {name: np.ones(24, np.float32)}))
    np.testing.assert_array_equal(checkpoint.tensor(name), 0)
    assert "biases of experts' outputs are left out, as in training" in checkpoint.quirks


def test_an_expert_that_is_lost_is_named(tmp_path):
    write_moe(tmp_path, moe_arrays())
    (tmp_path / "layer_1_expert_3_mp_rank_00_model_states.pt").unlink()
    assert_refused(tmp_path, r"missing: .*layers\.3\.mlp\.experts\.3\.dense_h_to_4h\.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlp_type": "residual"}, "MLP beside its experts"),
        ({"topk": 9}, f"topk 9 of {E} experts"),
        ({"topk": "two"}, "topk 'two'"),
        ({"swiglu": True}, "swiglu is True"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(settings, message, tmp_path):
    assert_refused(write_moe(tmp_path, moe_arrays(), **settings), message)


def test_ranks_in_stages_of_a_pipeline_are_refused(tmp_path):
    """Their layers are numbered within a stage, and so might be gates and experts, or not."""
    write_moe(tmp_path, moe_arrays(), in_folders=True, pipeline_model_parallel_size=2)
    for stage in (0, 1):
        shutil.copytree(tmp_path / "mp_rank_00", tmp_path / f"mp_rank_00_{stage:03}")
    shutil.rmtree(tmp_path / "mp_rank_00")
    assert_refused(tmp_path, "in 2 stages of a pipeline, which is not implemented for experts")


def test_adapters_of_models_that_transformers_does_not_have(tmp_path):
    checkpoint = open_checkpoint(write_moe(tmp_path, moe_arrays()))
    with pytest.raises(CheckpointError, match="is a Megatron-LM GPT with experts, for which PEFT has no adapters"):
        merge_lora(checkpoint, tmp_path / "adapter")
