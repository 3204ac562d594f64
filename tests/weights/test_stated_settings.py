"""What a checkpoint states is read wherever it stands; two statements that differ are refused, and none is made up."""

import argparse
import dataclasses
import json
import logging

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.recorded import MISSING
from support.tiny_checkpoint import assert_refused, write_json
from tinygpt.weights.open import open_checkpoint

torch = pytest.importorskip("torch", reason=MISSING)
from support.torch_programs import C, H, L, Nano, OfTorch, T, V, assert_computes, made  # noqa: E402

SIZES = {"n_head": H, "n_embd": C, "n_layer": L, "vocab_size": V, "block_size": T}
RELU = {"activation_function": "relu", "do_layer_norm_before": True}
NAMES = {
    "wte": "tokens",
    "wpe": "positions",
    "h.*.ln_1": "layers.*.norm1",
    "h.*.attn.c_attn.weight": "layers.*.attention.in_proj_weight",
    "h.*.attn.c_attn.bias": "layers.*.attention.in_proj_bias",
    "h.*.attn.c_proj": {"names": "layers.*.attention.out_proj", "transpose": False},
    "h.*.ln_2": "layers.*.norm2",
    "h.*.mlp.c_fc": "layers.*.up",
    "h.*.mlp.c_proj": "layers.*.down",
    "ln_f": "norm",
    "lm_head": "head",
    "counts": None,
}


@dataclasses.dataclass
class Settings:
    num_heads: int = H
    d_model: int = C
    dropout: float = 0.1


@dataclasses.dataclass
class GPTConfig:  # nanoGPT's
    block_size: int = T
    vocab_size: int = V
    n_layer: int = L
    n_head: int = H
    n_embd: int = C
    dropout: float = 0.0
    bias: bool = True


STATEMENTS = {
    "a dictionary": {"config": SIZES},
    "an object": {"settings": Settings()},
    "arguments": {"args": argparse.Namespace(n_heads=H, emb_dim=C, lr=1e-3)},
    "Lightning": {"hyper_parameters": {"lr": 1e-3, "model": {"num_attention_heads": H, "num_layers": L}}},
    "the checkpoint itself": {"n_head": H, "n_layer": L, "epoch": 4},
    "capitals": {"hparams": {"N_HEAD": H, "N_EMBD": C}},
    "two widths": {"config": {"heads": H, "dim": C, "hidden_dim": 4 * C}},
    "and another model's": {"config": SIZES, "teacher": {**SIZES, "n_head": 4, "n_embd": 2 * C}},
    "without sizes": {"config": {"n_head": H, "lr": 1e-3}},
    "without sizes, on top": {"n_head": H},
    "without sizes, of an object": {"args": argparse.Namespace(num_heads=H)},
    "in a list": {"configs": [{"name": "a run"}, {"n_head": H}]},
    "a float": {"config": {"n_head": float(H)}},
    "apart from sizes": {"config": {"model": {"dim": C, "depth": L}, "attention": {"heads": H}}},
    "next to one of no sizes": {"config": SIZES, "plots": {"heads": 4}},
}


@pytest.mark.parametrize("kind", STATEMENTS)
def test_settings_whose_sizes_are_the_tensors_are_read(tmp_path, kind):
    model = made(OfTorch())
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state, **STATEMENTS[kind]}, tmp_path / "ckpt.pt")
    write_named(tmp_path, RELU)
    assert_computes(tmp_path / "ckpt.pt", model)
    write_named(tmp_path, {**RELU, "n_head": 4})
    assert_refused(tmp_path / "ckpt.pt", "has n_head 2, and config.json beside it 4: correct that one")
    write_named(tmp_path, {**RELU, "num_heads": 4, "model_type": "gpt2", "n_head": 4})
    assert_refused(tmp_path / "ckpt.pt", "has n_head 2, and config.json beside it 4: correct that one")


def write_named(folder, config):
    write_json(folder / "config.json", config)
    names = {
        ours: {**at, "names": f"model.net.{at['names']}"}
        if isinstance(at, dict)
        else at and f"model.net.{at}"
        for ours, at in NAMES.items()
        if ours != "counts"
    }
    write_json(folder / "tensor_names.json", names | {"model.net.counts": None})


@pytest.mark.parametrize(
    "others",
    [
        {"a": SIZES, "b": {**SIZES, "n_head": 4}},
        {"a": {**SIZES, "heads": 4}},
        {"a": {"n_head": H}, "b": {"heads": 4}},
    ],
    ids=str,
)
def test_two_statements_that_differ_are_refused(tmp_path, others):
    torch.save({"model": made(Nano()).state_dict(), **others}, tmp_path / "ckpt.pt")
    assert_refused(tmp_path, "states the n_head [24] and [24]: save it with one of them")


@pytest.mark.parametrize("config", [{"n_head": 4, "n_embd": 2 * C}, {"n_head": H, "n_layer": 9}])
def test_settings_of_another_model_are_none_of_this_one(tmp_path, config):
    torch.save({"model": made(Nano()).state_dict(), "config": config}, tmp_path / "ckpt.pt")
    assert_refused(
        tmp_path, r"does not say how many heads its model has: write \S+config.json with n_head\.$"
    )


def test_heads_that_cannot_be_are_refused_by_their_number(tmp_path):
    for heads, sentence in (
        (3, f"n_embd {C} cannot be divided into 3 heads"),
        (0, "n_head is 0 and must be"),
    ):
        torch.save({"model": made(Nano()).state_dict(), "config": {"n_head": heads}}, tmp_path / "ckpt.pt")
        assert_refused(tmp_path, sentence)


@pytest.mark.parametrize("sizes", [SIZES, {"n_head": H}], ids=str)
def test_an_activation_that_the_file_states_is_read(tmp_path, sizes):
    config = {**sizes, "activation_function": "gelu"}
    torch.save({"model": made(Nano("none")).state_dict(), "config": config}, tmp_path / "ckpt.pt")
    assert_computes(tmp_path / "ckpt.pt", made(Nano("none")))
    write_json(tmp_path / "config.json", {"activation_function": "gelu_new"})
    assert_refused(tmp_path, "has activation_function 'gelu', and config.json beside it 'gelu_new'")


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("fields", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_the_scale_of_scores_is_read(tmp_path, fields, is_beside):
    settings = {**SIZES, "activation_function": "gelu", **({} if is_beside else fields)}
    torch.save({"model": made(Nano()).state_dict(), "config": settings}, tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", fields if is_beside else {})
    config = open_checkpoint(tmp_path / "ckpt.pt").config
    assert {name: getattr(config, name) for name in fields} == fields


def test_the_scale_of_scores_is_read_apart_from_sizes(tmp_path):
    settings = {"sizes": SIZES, "attention": {"scale_attn_weights": False}}
    torch.save({"model": made(Nano()).state_dict(), "config": settings}, tmp_path / "ckpt.pt")
    assert not open_checkpoint(tmp_path / "ckpt.pt").config.scale_attn_weights


@pytest.mark.parametrize("value", ["False", "false", 0])
@pytest.mark.parametrize("is_beside", [False, True])
def test_the_scale_of_scores_may_be_a_text(tmp_path, value, is_beside):
    """In a header of safetensors, all values are."""
    arrays = {
        name: np.ascontiguousarray(tensor.numpy()) for name, tensor in made(Nano()).state_dict().items()
    }
    told = {"scale_attn_weights": str(value)}
    save_file(
        arrays, tmp_path / "model.safetensors", metadata={"n_head": str(H)} | ({} if is_beside else told)
    )
    write_json(tmp_path / "config.json", {"scale_attn_weights": value if is_beside else False})
    assert not open_checkpoint(tmp_path / "model.safetensors").config.scale_attn_weights


@pytest.mark.parametrize(
    "name", ["activation_function", "layer_norm_epsilon", "scale_attn_weights", "n_head"]
)
def test_null_in_config_json_states_nothing(tmp_path, name):
    torch.save({"model": made(Nano()).state_dict(), "config": SIZES}, tmp_path / "ckpt.pt")
    expected = open_checkpoint(tmp_path / "ckpt.pt").config
    write_json(tmp_path / "config.json", {name: None})
    assert open_checkpoint(tmp_path / "ckpt.pt").config == expected


def test_settings_in_the_header_of_safetensors(tmp_path):
    model = made(Nano())
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in model.state_dict().items()}
    for metadata in ({name: str(size) for name, size in SIZES.items()}, {"config": json.dumps(SIZES)}):
        save_file(arrays, tmp_path / "model.safetensors", metadata)
        assert_computes(tmp_path / "model.safetensors", model)


# nanoGPT, build-nanogpt and minGPT have one set of names, and two activations.


def without_masks(model):
    return {name: one for name, one in model.state_dict().items() if not name.endswith(".attn.bias")}


BARE = {"bias": False, "norm_bias": False, "is_tied": True}
SHOWN = {
    "GPTConfig": ({"is_tied": True}, lambda m: {"model": m.state_dict(), "config": GPTConfig()}, {}),
    "its fields": (
        {"is_tied": True},
        lambda m: {"model": without_masks(m), "config": dataclasses.asdict(GPTConfig())},
        {},
    ),
    "no biases, no masks": (BARE, without_masks, {"n_head": H}),
    "no biases, masks": (BARE, lambda m: m.state_dict(), {"n_head": H}),
    "no biases, no masks, a head": ({**BARE, "is_tied": False}, without_masks, {"n_head": H}),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_nanogpt_by_what_it_holds(tmp_path, kind):
    fields, saved, config = SHOWN[kind]
    model = made(Nano("none", **fields))
    torch.save(saved(model), tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", config)
    assert assert_computes(tmp_path / "ckpt.pt", model).family == "nanoGPT"


@pytest.mark.parametrize(("is_tied", "has_masks"), [(True, False), (True, True), (False, False)])
def test_an_activation_that_nothing_shows_is_asked_for(tmp_path, is_tied, has_masks):
    model = made(Nano("none", is_tied=is_tied))
    torch.save(model.state_dict() if has_masks else without_masks(model), tmp_path / "ckpt.pt")
    assert_refused(tmp_path, 'write .*config.json with n_head, and an activation_function, "gelu_new"')
    write_json(tmp_path / "config.json", {"n_head": H, "activation_function": "gelu"})
    assert_computes(tmp_path / "ckpt.pt", model)


@pytest.mark.parametrize(("settings", "program"), [({}, "minGPT"), ({"config": SIZES}, "build-nanogpt")])
def test_a_guess_of_the_activation_is_told(tmp_path, caplog, settings, program):
    """Five sizes in a dictionary are of any program; build-nanogpt saves an object."""
    torch.save({"model": made(Nano()).state_dict(), **settings}, tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", {"n_head": H})
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tmp_path / "ckpt.pt")
        assert f"does not say its activation_function, which is gelu_new as in {program}" in caplog.text
        caplog.clear()
        write_json(tmp_path / "config.json", {"n_head": H, "activation_function": "gelu_new"})
        open_checkpoint(tmp_path / "ckpt.pt")
    assert not caplog.records


def test_an_activation_that_the_file_states_is_no_guess(tmp_path, caplog):
    config = {"n_head": H, "activation_function": "gelu"}
    torch.save({"model": made(Nano("none")).state_dict(), "config": config}, tmp_path / "ckpt.pt")
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(tmp_path / "ckpt.pt").quirks == ()
    assert not caplog.records


def test_a_guess_is_told_next_to_null_in_config_json(tmp_path, caplog):
    torch.save({"model": made(Nano()).state_dict(), "config": SIZES}, tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", {"activation_function": None})
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tmp_path / "ckpt.pt")
    assert "does not say its activation_function" in caplog.text


# GPT-2's own names.


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers", reason=MISSING)
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": H, "n_inner": 3 * C}
    return made(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict"])
@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({"n_head": H}, {}),
        ({"num_attention_heads": H}, {}),
        ({"n_head": H, "model_type": "gpt2"}, {}),
        (None, {"hyper_parameters": SIZES}),
        ({"n_positions": T}, {"hyper_parameters": SIZES}),
    ],
)
def test_sizes_that_config_json_leaves_out_are_the_tensors(tmp_path, theirs, key, config, others):
    prefix = "model." if key == "state_dict" else ""
    state = {f"{prefix}{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({key: state, **others}, tmp_path / "ckpt.pt")
    if config is not None:
        write_json(tmp_path / "config.json", config)
    assert_computes(tmp_path / "ckpt.pt", lambda ids: theirs(ids).logits)


def test_a_sentence_blames_config_json_for_what_it_says(tmp_path, theirs):
    state = theirs.state_dict()
    torch.save({"state_dict": state}, tmp_path / "ckpt.pt")
    assert_refused(tmp_path, "does not say how many heads")
    write_json(tmp_path / "config.json", {"n_positions": T})
    assert_refused(tmp_path, "does not say how many heads")
    write_json(tmp_path / "config.json", {"n_head": H, "n_embd": 2 * C})
    assert_refused(
        tmp_path, r"wte.weight is \(13, 8\) and config.json, with the tensors' sizes, asks for \(13, 16\)"
    )
    torch.save({"state_dict": {**state, "transformer.h.1.ln_1.bias": torch.ones(3)}}, tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", {"n_head": H})
    assert_refused(
        tmp_path, r"h.1.ln_1.bias is \(3,\) and config.json, with the tensors' sizes, asks for \(8,\)"
    )


def test_a_config_json_of_few_fields_and_another_model_type(tmp_path):
    save_file({"model.decoder.embed_tokens.weight": np.ones((3, 4), "f4")}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": "opt", "vocab_size": 3})
    assert_refused(tmp_path, r"config.json, with transformers' defaults, asks for \(3, 768\)")
