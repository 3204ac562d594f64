"""Megatron-LM's, NeMo's and DeepSpeed's checkpoints: each version and cut is one model to the bit."""

import io
import shutil
import tarfile

import numpy as np
import pytest

from support.apart import outcome
from support.megatron_writer import Form, megatron, nemo, nemo_members, rank_file, tar_bytes
from support.moe_models import EXPERT_LAYERS, E, F, moe_arrays, write_moe
from support.tables import rows
from support.tiny_checkpoint import assert_holds, assert_refused, gpt2_arrays, write_json
from support.torch_files import Call, own_bytes
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.checkpoint import random_checkpoint
from tinygpt.weights.config import HEAD, ModelConfig
from tinygpt.weights.containers.ranks import _tar_members
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.tensor import MappedFile

# Divisible by 2 and by 3, by which GPUs share it, and with as many layers as stages of a pipeline need.
CONFIG = ModelConfig(vocab_size=18, n_positions=5, n_embd=24, n_head=6, n_layer=4, n_inner=36)
ARRAYS = gpt2_arrays(random_checkpoint("random", CONFIG))
ERAS = dict(
    rows("""
"2020" | {"layers": "language_model.transformer", "attention": "attention"}
"2021" | {"layers": "language_model.encoder", "attention": "self_attention"}
mixed | {"layers": "language_model.encoder", "attention": "attention"}
core | {"core": "local"}
core fused | {"core": "fused"}
""")
)


def form(**fields):
    return Form(heads=6, **fields)


def same_bits(checkpoint, arrays=ARRAYS):
    assert_holds(checkpoint, arrays)
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), arrays["wte.weight"])
    assert checkpoint.tied


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("era", ["2020", "2021", "mixed"])
def test_every_version_cut_for_any_number_of_gpus(tmp_path, version, tp, pp, era):
    checkpoint = open_checkpoint(megatron(tmp_path, ARRAYS, form(version=version, tp=tp, pp=pp, **ERAS[era])))
    same_bits(checkpoint)
    sizes = ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer", "n_inner")
    assert all(getattr(checkpoint.config, name) == getattr(CONFIG, name) for name in sizes)
    assert f"checkpoint_version {version}:" in checkpoint.quirks[0]
    assert not list(tmp_path.rglob("witness"))


@pytest.mark.parametrize("era", ["core", "core fused"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
def test_megatron_cores_names(tmp_path, era, tp, pp):
    same_bits(open_checkpoint(megatron(tmp_path, ARRAYS, form(tp=tp, pp=pp, **ERAS[era]))))


def test_a_head_of_its_own(tmp_path):
    state = rank_file(ARRAYS, form(), untie_embeddings_and_output_weights=True)
    state["model"]["language_model.output_layer.weight"] = ARRAYS["wte.weight"] + 1
    (tmp_path / "model_optim_rng.pt").write_bytes(own_bytes(state))
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), ARRAYS["wte.weight"] + 1)
    assert not checkpoint.tied


def test_a_name_of_two_lines_is_ignored_as_any_other(tmp_path):
    state = {**rank_file(ARRAYS, form()), "a\nb": np.ones(2, np.float32)}
    (tmp_path / "model_optim_rng.pt").write_bytes(own_bytes(state))
    same_bits(open_checkpoint(tmp_path))


@pytest.mark.parametrize("era", ["2021", "core"])
def test_stages_that_alternate(tmp_path, era):
    same_bits(open_checkpoint(megatron(tmp_path, ARRAYS, form(tp=2, pp=2, vpp=2, **ERAS[era]))))


def test_a_file_alone_of_the_old_form_without_arguments(tmp_path):
    """As NVIDIA published its 345M: no settings, no version, from before torch 1.6."""
    state = rank_file(ARRAYS, form(version=0, **ERAS["2020"]))
    del state["args"]
    (tmp_path / "model_optim_rng.pt").write_bytes(own_bytes(state, is_legacy=True))
    assert_refused(tmp_path, "does not say how many heads")
    write_json(tmp_path / "config.json", {"n_head": 6})
    checkpoint = open_checkpoint(tmp_path / "model_optim_rng.pt")
    same_bits(checkpoint)
    assert (checkpoint.config.activation, checkpoint.config.layer_norm_epsilon) == ("gelu_tanh", 1e-5)


@pytest.mark.parametrize("place", ["", "mp_rank_01", "mp_rank_01/model_optim_rng.pt"])
def test_a_rank_alone_or_one_that_is_lost(tmp_path, place):
    ranks = megatron(tmp_path, ARRAYS, form(tp=2)) / "iter_0000007"
    (ranks / "mp_rank_00").rename(tmp_path / "moved")
    assert_refused(ranks / place, "holds 1 of 2 x 1 ranks")


def test_ranks_of_two_iterations(tmp_path):
    """What every GPU has whole tells them apart."""
    later = ARRAYS | {"h.2.ln_1.bias": ARRAYS["h.2.ln_1.bias"] + 1, "wpe.weight": ARRAYS["wpe.weight"] * 2}
    one, other = (megatron(tmp_path / name, a, form(tp=3, pp=2)) for name, a in (("1", ARRAYS), ("2", later)))
    for rank in ("mp_rank_02_000", "mp_rank_02_001"):
        shutil.rmtree(one / "iter_0000007" / rank)
        (other / "iter_0000007" / rank).rename(one / "iter_0000007" / rank)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(one)
    wanted = "embedding.position_embeddings.weight (part 2); layers.2.input_layernorm.bias (part 2)"
    assert f"  not the same in all parts: {wanted}\n" in str(error.value)
    assert "ranks of two iterations" in str(error.value)


def without(*ends):
    return {name: array for name, array in ARRAYS.items() if not name.endswith(ends)}


@pytest.mark.parametrize(
    ("settings", "activation"),
    rows("""
{} | gelu_tanh
{"bias_gelu_fusion": false} | gelu
{"bias_gelu_fusion": false, "openai_gelu": true} | gelu_tanh
{"bias_gelu_fusion": "False", "openai_gelu": "False"} | gelu
{"bias_gelu_fusion": 1, "onnx_safe": "false"} | gelu_tanh
"""),
)
def test_the_activation_that_settings_decide(tmp_path, settings, activation):
    assert open_checkpoint(megatron(tmp_path, ARRAYS, form(), **settings)).config.activation == activation


def test_biases_are_those_that_the_settings_say(tmp_path):
    """A bias that is lost is missed, and one that should not be there is not used."""
    lost = without(".c_attn.bias", ".c_proj.bias", ".c_fc.bias")
    path = megatron(tmp_path / "lost", lost, form(), add_bias_linear=True)
    assert_refused(path, r"missing: layers\.0\.attention\.query_key_value\.bias")
    path = megatron(tmp_path / "more", ARRAYS, form(), add_bias_linear=False)
    assert_refused(path, r"unexpected: .*query_key_value\.bias")
    path = nemo(tmp_path / "nemo", lost, form(), more="bias: false")
    assert not open_checkpoint(path).tensor("h.1.mlp.c_fc.bias").any()


@pytest.mark.parametrize(("linear", "queries"), [("add_bias_linear", "add_qkv_bias"), ("bias", "qkv_bias")])
def test_biases_of_queries_keys_and_values_alone(tmp_path, linear, queries):
    arrays = without(".c_proj.bias", ".c_fc.bias")
    checkpoint = open_checkpoint(megatron(tmp_path, arrays, form(), **{linear: False, queries: True}))
    np.testing.assert_array_equal(checkpoint.tensor("h.1.attn.c_attn.bias"), ARRAYS["h.1.attn.c_attn.bias"])
    assert not checkpoint.tensor("h.1.mlp.c_fc.bias").any()


SIZES = rows(r"""
num_layers              | 5  | missing: layers\.4\.input_layernorm\.weight
hidden_size             | 30 | is \(18, 24\) and its settings asks for \(18, 30\)
ffn_hidden_size         | 42 | is \(36,\) and its settings asks for \(42,\)
max_position_embeddings | 11 | is \(5, 24\) and its settings asks for \(11, 24\)
""")


@pytest.mark.parametrize(("name", "size", "wanted"), SIZES)
def test_sizes_are_those_that_the_settings_say(tmp_path, name, size, wanted):
    """A file that lost its last layers is no shorter model."""
    assert_refused(megatron(tmp_path, ARRAYS, form(), **{name: size}), wanted)


REFUSED = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "num_experts": 8,
}
REFUSED |= dict.fromkeys(("swiglu", "apply_residual_connection_post_layernorm", "apply_layernorm_1p"), True)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_change_the_arithmetic_are_refused_by_name(tmp_path, name):
    assert_refused(
        megatron(tmp_path, ARRAYS, form(), **{name: REFUSED[name]}), f"{name} is {REFUSED[name]!r}"
    )


@pytest.mark.parametrize(
    "version",
    [4.0, [3], True, Call("numpy.core.multiarray scalar", 3.0)],
    ids=["4", "list", "bool", "object"],
)
def test_a_version_that_is_not_known(tmp_path, version):
    state = rank_file(ARRAYS, form()) | {"checkpoint_version": version}
    (tmp_path / "model_optim_rng.pt").write_bytes(own_bytes(state))
    assert_refused(tmp_path, r"checkpoint_version .* is not implemented")


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("prefix", ["model.", "model.module.", "state_dict.model."])
def test_an_archive_and_what_it_was_unpacked_into(tmp_path, tp, pp, prefix):
    path = nemo(tmp_path / "packed", ARRAYS, form(tp=tp, pp=pp), prefix=prefix)
    same_bits(open_checkpoint(path))
    for name, data in nemo_members(ARRAYS, form(tp=tp, pp=pp), prefix=prefix).items():
        place = tmp_path / "unpacked" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    same_bits(open_checkpoint(tmp_path / "unpacked"))


def test_its_tokenizer_and_its_settings(tmp_path):
    checkpoint = open_checkpoint(nemo(tmp_path, ARRAYS, form()))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("abb<|endoftext|>") == [2, 1, 3]
    assert tokenizer.special_ids == {3}
    assert (checkpoint.container, checkpoint.config.layer_norm_epsilon) == ("NeMo", 1e-5)


SETTINGS = """
"a: [1" | not valid YAML
"a: &x [1, 2]\\nb: [*x, *x]" | has aliases
"a: !!timestamp x" | not valid YAML
"a: !!python/object/apply:os.system [ls]" | not valid YAML
"""
ARCHIVES = [
    *rows(SETTINGS),
    ("", "is not NeMo's"),
    ("[" * 1000, "more than 100 levels"),
    ("a: 1" + ":59" * 200 + ":59.5", "not valid YAML"),  # base 60, beyond floats
]


@pytest.mark.parametrize(("settings", "sentence"), ARCHIVES)
def test_archives_that_are_refused(tmp_path, settings, sentence):
    members = nemo_members(ARRAYS, form()) | {"./model_config.yaml": settings.encode()}
    if not settings:
        del members["./model_config.yaml"]
    path = tmp_path / "x.nemo"
    path.write_bytes(tar_bytes(members))
    assert_refused(path, sentence)


def test_a_compressed_archive_and_a_damaged_one(tmp_path):
    for data in (
        tar_bytes(nemo_members(ARRAYS, form()), "w:gz"),
        tar_bytes(nemo_members(ARRAYS, form()))[:3000],
    ):
        (tmp_path / "x.nemo").write_bytes(data)
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "x.nemo")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
@pytest.mark.parametrize(("size", "count"), [(1, 5000), (2**45, 1), (2**62, 1)])
def test_an_archive_whose_headers_claim_names_without_end(tmp_path, kind, size, count):
    """No more is read than there is, and what is chained is not followed for ever."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, size
    (tmp_path / "x.nemo").write_bytes((header.tobuf(tarfile.GNU_FORMAT) + bytes(512)) * count)
    assert_refused(tmp_path / "x.nemo", "damaged archive" if size > 1 else "without model_config|is a link")


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_and_sizes_in_extended_headers(tmp_path, kind):
    """A size beyond 8 GiB is in an extended header alone."""
    with tarfile.open(
        tmp_path / "x", "w:", format=kind, pax_headers={"comment": "of all\n11 path=x\n"}
    ) as archive:
        accented = "d\u00e9" * (1 if kind == tarfile.USTAR_FORMAT else 200) + "/"
        for name in ("a", f"{'b' * 90}/{'c' * 90}", accented):
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = 0 if info.isdir() else len(name)
            info.pax_headers = {"size": str(info.size), "mtime": "1.5"}
            archive.addfile(info, io.BytesIO(name.encode()))
    with tarfile.open(tmp_path / "x") as archive:
        expected = [(m.type, m.name, range(m.offset_data, m.offset_data + m.size)) for m in archive]
    assert [len(data) for _, _, data in expected] == [1, 181, 0]
    assert [*_tar_members(MappedFile(tmp_path / "x"))] == expected


@pytest.mark.parametrize(
    "header", [b"1" * 100_000, b"2 " * 40_000 + b"="], ids=["digits", "one key in another"]
)
def test_an_extended_header_whose_work_is_the_square_of_its_size(tmp_path, header):
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    info.size = len(header)
    (tmp_path / "x.nemo").write_bytes(
        info.tobuf(tarfile.USTAR_FORMAT) + header + b"\0" * (-len(header) % 512)
    )
    assert "without model_config.yaml" in outcome("open_checkpoint(folder)", tmp_path, 4, 300)


# DeepSpeed's folders of ranks and experts.


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


def test_biases_that_were_never_added_are_left_out(tmp_path):
    arrays = moe_arrays()
    name = "h.1.mlp.experts.2.c_proj.bias"
    others = {name: np.ones(24, np.float32), "h.0.ln_1._extra_state": np.ones(3, np.uint8)}
    checkpoint = open_checkpoint(write_moe(tmp_path, arrays | others))
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
    with pytest.raises(
        CheckpointError, match="is a Megatron-LM GPT with experts, for which PEFT has no adapters"
    ):
        merge_lora(checkpoint, tmp_path / "adapter")
