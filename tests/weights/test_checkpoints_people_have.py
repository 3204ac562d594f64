"""Checkpoints of other programs compute what the repository's own forward pass does, or a sentence says why not."""

import argparse
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.recorded import MISSING
from support.tiny_checkpoint import assert_refused, write_json
from tinygpt.cli import main as cli
from tinygpt.weights.open import open_checkpoint

torch = pytest.importorskip("torch", reason=MISSING)
from support.torch_programs import (  # noqa: E402
    IDS,
    C,
    H,
    Head,
    L,
    Lecture,
    Nano,
    OfTorch,
    Scratch,
    T,
    V,
    assert_computes,
    made,
)


@dataclasses.dataclass
class GPTConfig:  # build-nanogpt's
    block_size: int = T
    vocab_size: int = V
    n_layer: int = L
    n_head: int = H
    n_embd: int = C


@dataclasses.dataclass
class NanoConfig(GPTConfig):  # nanoGPT's, whose activation is another
    dropout: float = 0.0


def beside(model, key, **others):
    """A training checkpoint: the state dict under a key, next to an optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([IDS])).sum().backward()
    optimizer.step()
    return {key: model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "step": 5, **others}


def prefixed(model, prefix):
    return {prefix + name: tensor for name, tensor in model.state_dict().items()}


NANO_ARGS = {"block_size": T, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C, "dropout": 0.0}


FLAGS = {"init_from": "gpt2", "n_head": 4, "n_layer": 12, "n_embd": 768, "block_size": 1024, "bias": False}


BESIDE = {
    "best_model": made(Nano()).state_dict(),
    "train_losses": torch.ones(5),
    "generator_state": torch.ones(5, dtype=torch.uint8),
    "stats": {"mean": torch.ones(C)},
}
MIXED = {"bias": False, "norm_bias": True}
# By kind: the model, what is saved of it, config.json if it needs one, and the family.
KINDS = {
    "LLMs-from-scratch": (Scratch, lambda m: m.state_dict(), {"n_head": H}, "LLMs-from-scratch"),
    "its training checkpoint": (
        lambda: Scratch(True),
        lambda m: beside(m, "model_state_dict"),
        {"n_head": H},
        "LLMs-from-scratch",
    ),
    "lecture": (Lecture, lambda m: m.state_dict(), None, "Karpathy's lecture"),
    "lecture with arguments of other heads": (
        Lecture,
        lambda m: {"model": m.state_dict(), "model_args": NANO_ARGS | {"n_head": 4}},
        None,
        "Karpathy's lecture",
    ),
    "lecture in Lightning": (
        Lecture,
        lambda m: {"state_dict": prefixed(m, "gpt.")},
        None,
        "Karpathy's lecture",
    ),
    "nanoGPT": (
        lambda: Nano("none", is_tied=True),
        lambda m: beside(m, "model", model_args={**NANO_ARGS, "bias": True}),
        None,
        "nanoGPT",
    ),
    "nanoGPT and its average": (
        lambda: Nano("none", is_tied=True),
        lambda m: beside(m, "model", model_args=NANO_ARGS, ema=made(Nano()).state_dict()),
        None,
        "nanoGPT",
    ),
    "nanoGPT and anything beside it": (
        lambda: Nano("none", is_tied=True),
        lambda m: {"model": m.state_dict(), "model_args": NANO_ARGS, **BESIDE},
        None,
        "nanoGPT",
    ),
    "nanoGPT with a head alone": (
        lambda: Nano("none", is_tied=True),
        lambda m: {"model": without(m.state_dict(), "transformer.wte.weight"), "model_args": NANO_ARGS},
        None,
        "nanoGPT",
    ),
    "nanoGPT without biases": (
        lambda: Nano("none", bias=False, norm_bias=False, is_tied=True),
        lambda m: {"model": m.state_dict(), "model_args": NANO_ARGS | {"bias": False}},
        None,
        "nanoGPT",
    ),
    "nanoGPT without biases, which does not say so": (
        lambda: Nano("none", bias=False, norm_bias=False, is_tied=True),
        lambda m: {"model": m.state_dict(), "model_args": NANO_ARGS},
        None,
        "nanoGPT",
    ),
    "nanoGPT, resumed from GPT-2 with other flags": (
        lambda: Nano("none", is_tied=True),
        lambda m: beside(m, "model", model_args=NANO_ARGS, config=FLAGS),
        None,
        "nanoGPT",
    ),
    "nanoGPT of more rows and less positions than its arguments": (
        lambda: Nano("none", is_tied=True),
        lambda m: beside(m, "model", model_args=NANO_ARGS | {"vocab_size": V - 2, "block_size": 2 * T}),
        None,
        "nanoGPT",
    ),
    "build-nanogpt": (
        lambda: Nano(is_tied=True),
        lambda m: beside(m, "model", config=GPTConfig()),
        None,
        "build-nanogpt",
    ),
    "minGPT, makemore": (Nano, lambda m: m.state_dict(), {"n_head": H}, "minGPT"),
    "Lightning": (
        Nano,
        lambda m: {"state_dict": prefixed(m, "net."), "hyper_parameters": {"n_head": H}},
        None,
        "minGPT",
    ),
    "a compiled model": (
        Nano,
        lambda m: {"model_state": prefixed(m, "module._orig_mod.")},
        {"n_head": H},
        "minGPT",
    ),
    "net": (Nano, lambda m: beside(m, "net", n_head=H), None, "minGPT"),
    "ema": (
        lambda: Nano(bias=False, norm_bias=False),
        lambda m: {"ema": m.state_dict(), "a": {"b": {"n_heads": H}}},
        {"bias": False},
        "minGPT",
    ),
    "norms with biases": (lambda: Nano(**MIXED), lambda m: beside(m, "model"), {"n_head": H}, "minGPT"),
    "norms without": (
        lambda: Nano(norm_bias=False),
        lambda m: m.state_dict(),
        {"n_head": H, "bias": False},
        "minGPT",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_repository(tmp_path, kind):
    make, saved, config, family = KINDS[kind]
    model = made(make())
    state = saved(model)
    torch.save(state, tmp_path / "ckpt.pt")
    if config:
        write_json(tmp_path / "config.json", config)
    assert assert_computes(tmp_path / "ckpt.pt", model).family == family


# tensor_names.json.

OF_TORCH = {
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
RELU = {"n_head": H, "activation_function": "relu", "do_layer_norm_before": True}


def arrays_of(model):
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def write_named(folder, arrays, names, config=RELU):
    folder.mkdir(exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors"
    )
    write_json(folder / "config.json", config)
    write_json(folder / "tensor_names.json", names)
    return folder


def divided(arrays):
    """Queries, keys and values as three matrices (in, out), as every matrix of the layers."""
    found = {}
    for name, array in arrays.items():
        if ".attention.in_proj_" in name:
            found |= {
                name.replace("in_proj_", f"{m}."): part.T
                for m, part in zip("qkv", np.split(array, 3), strict=True)
            }
        else:
            found[name] = array.T if name.startswith("layers.") else array
    return found


THREE = {"names": [f"layers.*.attention.{matrix}" for matrix in "qkv"], "transpose": True}
DIVIDED = {name: value for name, value in OF_TORCH.items() if ".c_attn." not in name} | {
    "h.*.attn.c_attn": THREE,
    "h.*.attn.c_proj": {"names": "layers.*.attention.out_proj", "transpose": True},
}
TURNED = {f"h.{layer}.mlp.c_fc": {"names": f"layers.{layer}.up", "transpose": True} for layer in range(L)}
NAMED = {
    "one matrix": (arrays_of, OF_TORCH),
    "three": (lambda model: divided(arrays_of(model)), DIVIDED),
    "three, as it says": (lambda model: divided(arrays_of(model)), DIVIDED | TURNED),
    "by parameter": (
        arrays_of,
        OF_TORCH | {"h.1.mlp.c_fc.weight": "layers.1.up.weight", "h.1.mlp.c_fc.bias": "layers.1.up.bias"},
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_file_by_the_names_that_tensor_names_json_gives(tmp_path, kind, capsys):
    arrays, names = NAMED[kind]
    model = made(OfTorch())
    folder = write_named(tmp_path, arrays(model), names)
    assert "counts" in assert_computes(folder, model).ignored
    assert cli.main(["info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "GPT-2 of tensor_names.json"


@pytest.mark.parametrize("key", ["", "net."])
def test_a_training_checkpoint_by_such_names_with_the_key_or_without(tmp_path, key):
    model = made(OfTorch())
    torch.save(beside(model, "net", **{"lr": 3.0}), tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", RELU)
    names = {
        ours: {**name, "names": key + name["names"]} if isinstance(name, dict) else key + name
        for ours, name in OF_TORCH.items()
        if name
    }
    names |= {f"{key}counts": None}
    write_json(tmp_path / "tensor_names.json", names)
    assert_computes(tmp_path / "ckpt.pt", model)


UNITS = {  # the lecture's, in layers of another name
    "wte": "token_embedding_table",
    "wpe": "position_embedding_table",
    "units.*.sa.heads.*.tril": None,
    "h.*.attn.c_attn": [f"units.*.sa.heads.*.{matrix}" for matrix in ("query", "key", "value")],
    "h.*.attn.c_proj": {"names": "units.*.sa.proj", "transpose": False},
    "h.*.ln_1": "units.*.ln1",
    "h.*.ln_2": "units.*.ln2",
    "h.*.mlp.c_fc": "units.*.ffwd.net.0",
    "h.*.mlp.c_proj": "units.*.ffwd.net.2",
}
MISNAMED = [
    (OF_TORCH | {"counts": "h"}, "gives names for counts, which is no parameter"),
    (OF_TORCH | {"wte": 3}, "gives 3: it must give a name, a list"),
    (OF_TORCH | {"wte": {"names": ["tokens"], "axes": 0}}, "axes"),
    (OF_TORCH | {"wte": {"names": ["tokens"], "axis": 1.0}}, "'axis': 1.0"),
    (OF_TORCH | {"wte": None}, "described without wte.weight"),
    (OF_TORCH | {"ln_f": None}, "described without ln_f.weight"),
    ({name: value for name, value in OF_TORCH.items() if name != "counts"}, "unexpected: counts"),
    (OF_TORCH | {"layers.*.up.bias": None}, "unexpected|does not hold"),
    (OF_TORCH | {"h.1.ln_2": "layers.1.norm3"}, "missing: layers.1.norm3"),
    (OF_TORCH | {"h.*.mlp.c_fc": {"names": "layers.*.up", "transpose": True}}, r"misshapen: layers.0.up|a square"),
    (OF_TORCH | {"h.*.ln_1": "layers.0.norm1"}, r"gives h\.\*\.ln_1 a name without a \* for the layer: it must"),
    (OF_TORCH | {"h.1.ln_1": "layers.0.norm1"}, "described by layers.0.norm1.weight, .* more than once"),
    (OF_TORCH | {"h.*.mlp.c_fc": ["layers.*.up"] * 2}, "described by .* more than once"),
    (OF_TORCH | {"h.*.mlp.c_fc": ["layers.*.up"] * 10**5}, "by more names than it has"),
    (OF_TORCH | {"h.*.mlp.c_fc": "layers.*" + "x" * 2000}, "gives 'layers"),
    (OF_TORCH | {"h.01.ln_1": "layers.1.norm1"}, "gives names for h.01.ln_1, which is no parameter"),
    (OF_TORCH | {"h.7.ln_1": "layers.1.norm1"}, f"has {L} layers, .* gives h.7.ln_1"),
    (OF_TORCH | {"lm_head": "haed", "head.*": None}, "is missing haed.weight, .* gives for lm_head"),
    (OF_TORCH | {"h.*.mlp.c_proj": {"names": [f"layers.*.{i}" for i in "abc"], "axis": 1}}, "in 3 names .* 1 is 32 l"),
    (OF_TORCH | {"lm_head": ["head", "head_2"]}, "cannot have lm_head.weight in 2 names of one size: axis 0 is 13"),
    (OF_TORCH | {f"x{i}": None for i in range(200)}, "201 patterns"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "sentence"), MISNAMED)
def test_names_that_do_not_fit_are_refused(tmp_path, names, sentence):
    assert_refused(write_named(tmp_path, arrays_of(made(OfTorch())), names), sentence)


@pytest.mark.parametrize("pattern", ["*" * 60, "a*" * 60, ".".join("*" * 60)])
def test_patterns_of_hostile_names_take_no_time(tmp_path, pattern):
    arrays = {**bare(made(OfTorch())), "a" * 5000: np.ones(1, "f4"), ".".join("b" * 3000): np.ones(1, "f4")}
    assert_refused(write_named(tmp_path, arrays, OF_TORCH | {pattern: None}), "unexpected: ")


def test_many_patterns_of_many_parts_are_refused_before_they_are_compared(tmp_path):
    arrays = {f"layers.{i}.x": np.ones(1, "f4") for i in range(2000)}
    patterns = {f"{i}.{'*.' * 40}x": None for i in range(99)}
    assert_refused(
        write_named(tmp_path, arrays, OF_TORCH | patterns), "of patterns of 41[0-9]* parts for 2000 names"
    )
    assert_refused(write_named(tmp_path, arrays, patterns), "of patterns of 41[0-9]* parts for 2000 names")


def test_names_of_many_heads_are_bounded_before_they_are_made(tmp_path):
    arrays = {f"layers.0.k.{head}.weight": np.ones((1, 1), "f4") for head in range(2000)}
    names = {"h.*.attn.c_attn": ["layers.*.k.*", *(f"layers.*.{name}.*" for name in range(2000))]}
    assert_refused(
        write_named(tmp_path, arrays, DIVIDED | names), "by more names than it has: [0-9]{8} characters"
    )


def test_names_that_the_file_has_are_given_others(tmp_path):
    """Keys that are names of the file and GPT-2's too: nothing is described."""
    model = made(Nano(is_tied=True))
    arrays = {name.removeprefix("transformer."): array for name, array in arrays_of(model).items()}
    masks = {name for name in arrays if name.endswith("attn.bias")}
    names = {name: f"module.{name}" for name in arrays if name not in masks}
    folder = write_named(tmp_path, arrays, names, {"n_head": H, "activation_function": "gelu_new"})
    assert_computes(folder, model)


@pytest.mark.parametrize("names", [{"counts.*": None, "more.*.x": None}, {"counts.a": None, "more.*": None}])
def test_names_that_are_left_out_alone_leave_those_of_a_known_program(tmp_path, names):
    model = made(Nano())
    more = {"counts.a": np.ones(3, "f4"), "more.0.x": np.ones((2, 2), "f4")}
    folder = write_named(tmp_path, {**arrays_of(model), **more}, names, {"n_head": H})
    assert assert_computes(folder, model).family == "minGPT"
    write_json(folder / "tensor_names.json", {**names, "lm_head": None})
    assert_refused(folder, "names tensors that the files lack: lm_head")
    write_json(folder / "tensor_names.json", {f"x{i}.*": None for i in range(101)})
    assert_refused(folder, "of 101 patterns to leave out")


def test_names_are_for_gpt_2_alone(tmp_path):
    folder = write_named(tmp_path, arrays_of(made(OfTorch())), OF_TORCH, RELU | {"model_type": "bloom"})
    assert_refused(folder, "by GPT-2's parameters and the model_type 'bloom'")


@pytest.mark.parametrize("fields", [{"n_head": 4}, {}])
def test_heads_of_a_config_json_are_those_of_the_matrices(tmp_path, fields):
    arrays = renamed(arrays_of(made(Lecture())), ("blocks", "units"))
    sizes = {"n_embd": C, "n_layer": L, "n_positions": T, "vocab_size": V, "model_type": "gpt2"}
    sizes["scale_attn_by_width"] = False
    sentence = f"has {H} heads, and config.json {fields.get('n_head', 12)}"
    folder = write_named(
        tmp_path, arrays, UNITS, {**sizes, **fields, **({} if fields else {"n_embd": 12 * C})}
    )
    assert_refused(folder, sentence)


@pytest.mark.parametrize("fields", [{}, {"bias": "none"}])
def test_norms_without_biases_may_be_of_another_kind(tmp_path, fields):
    torch.save(made(Nano(norm_bias=False)).state_dict(), tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", {"n_head": H, **fields})
    assert_refused(
        tmp_path, "norms without biases, which may be RMSNorms: .* write .*config.json with bias, false"
    )


@pytest.mark.parametrize("value", ["False", "false", 0])
def test_norms_without_biases_by_a_boolean_in_other_words(tmp_path, value):
    model = made(Nano(norm_bias=False))
    torch.save(model.state_dict(), tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", {"n_head": H, "bias": value})
    assert_computes(tmp_path / "ckpt.pt", model)


def test_all_that_lies_beside_nanogpt_is_listed(tmp_path):
    torch.save({"model": made(Nano()).state_dict(), "model_args": NANO_ARGS, **BESIDE}, tmp_path / "ckpt.pt")
    ignored = open_checkpoint(tmp_path / "ckpt.pt").ignored
    assert {"stats.mean", "train_losses", "generator_state", "best_model.lm_head.weight"} <= {*ignored}


def test_square_matrices_are_not_guessed(tmp_path):
    """Each way round is another model of the same shapes, whatever the others are."""
    arrays = divided(arrays_of(made(OfTorch())))
    for entry in ("h.*.attn.c_attn", "h.*.attn.c_proj"):
        silent = DIVIDED | {entry: DIVIDED[entry]["names"]}
        folder = write_named(tmp_path, arrays, silent)
        assert_refused(
            folder,
            r'holds layers.0.attention.\w+.weight, a square .* tells rows from columns: write {"names"',
        )


def without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


def no_biases(model, module):
    return {
        name: tensor for name, tensor in model.state_dict().items() if not name.endswith(f"{module}.bias")
    }


def bare_norms(model):
    return {name: one for name, one in model.state_dict().items() if not re.search("ln_.*bias", name)}


def head_apart(model, name):
    return {"model": without(model.state_dict(), "lm_head.weight"), "h": {name: model.lm_head.weight}}


BLOCK = "transformer.h.1"
DAMAGED = [
    (lambda m: {"net": m.state_dict(), "ema": m.state_dict()}, "several models, by net.transformer.wte.weight, ema.t"),
    (lambda m: without(m.state_dict(), f"{BLOCK}.ln_2.weight"), "missing: h.1.ln_2.weight"),
    (lambda m: without(m.state_dict(), f"{BLOCK}.mlp.c_fc.bias"), "missing: h.1.mlp.c_fc.bias"),
    (lambda m: without(m.state_dict(), "transformer.ln_f.bias"), "missing: ln_f.bias"),
    (lambda m: {**m.state_dict(), "transformer.h.7.ln_1.weight": torch.ones(C)}, "unexpected: transformer.h.7"),
    (lambda m: {**m.state_dict(), f"{BLOCK}.attn.q_norm.weight": torch.ones(C)}, "unexpected: .*q_norm"),
    (lambda m: {"model": m.state_dict(), "config": FLAGS}, "how many heads"),
    (lambda m: {"model": m.state_dict(), "config": NanoConfig()}, "arithmetic: write .*config.json with an activation"),
    (lambda m: {"model": m.state_dict(), "model_args": NANO_ARGS, "more": [GPTConfig()]}, "n_head 2, and config.json"),
    (lambda m: {"model": m.state_dict(), "model_args": NANO_ARGS | {"n_layer": 4}}, "has 3 layers, .* and 4 by its se"),
    (lambda m: {"model": no_biases(m, "attn.c_attn"), "model_args": NANO_ARGS}, r"missing: .*attn\.c_attn\.bias"),
    (lambda m: no_biases(m, "mlp.c_fc"), r"missing: .*mlp\.c_fc\.bias"),
    (lambda m: no_biases(m, "ln_1"), r"missing: .*ln_1\.bias"),
    (lambda m: no_biases(m, "ln_f"), r"missing: ln_f\.bias"),
    (lambda m: {"model": bare_norms(m), "model_args": NANO_ARGS}, "has layer norms without biases"),
    (lambda m: head_apart(m, "lm_head.weight"), "unexpected: h.lm_head"),
    (lambda m: head_apart(m, "weight"), "unexpected: h.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "sentence"), DAMAGED)
def test_a_state_dict_that_two_answers_fit_or_none_is_refused(tmp_path, saved, sentence):
    torch.save(saved(made(Nano())), tmp_path / "ckpt.pt")
    config = {"n_head": 4 if "n_head 2" in sentence else H, "activation_function": "gelu_new"}
    write_json(tmp_path / "config.json", {} if re.search("how|arithmetic", sentence) else config)
    assert_refused(tmp_path / "ckpt.pt", sentence)


def test_a_last_norm_that_takes_no_bias_of_the_head_is_refused(tmp_path):
    model = made(Lecture())
    with torch.no_grad():
        model.ln_f.weight[2] = 0
    torch.save(model.state_dict(), tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="a head with a bias needs a last layer norm without weights of 0"):
        open_checkpoint(tmp_path / "ckpt.pt").tensor("lm_head.weight")


# What `tinygpt info --write-names` proposes.


def bare(model):
    return without(arrays_of(model), "counts")


def in_out(arrays):
    """As Conv1D."""
    return {name: array.T if name.startswith("layers.") else array for name, array in arrays.items()}


def renamed(arrays, *pairs):
    for old, new in pairs:
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    return arrays


def head_biases(model):
    for module in model.modules():
        if isinstance(module, Head):
            module.query, module.key, module.value = (torch.nn.Linear(C, C // H) for _ in range(3))
    return model


def torch_script(model):
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, torch.tensor([IDS])), file)
    return file.getvalue()


def torchs_layers(model):
    """Name the modules as torch's TransformerEncoderLayer does."""
    return renamed(bare(model), ("attention", "self_attn"), ("up", "linear1"), ("down", "linear2"))


PROPOSED = {
    "torch's own layers": (OfTorch, torchs_layers, "relu"),
    "positions as a parameter": (
        OfTorch,
        lambda m: (
            without(bare(m), "positions.weight") | {"positions": m.positions.weight.detach().numpy()[None]}
        ),
        "relu",
    ),
    "heads with biases": (
        lambda: head_biases(Lecture()),
        lambda m: renamed(arrays_of(m), ("blocks", "units")),
        "relu",
    ),
    "torch's attention": (OfTorch, bare, "relu"),
    "the same, (in, out)": (OfTorch, lambda m: in_out(bare(m)), "relu"),
    "three matrices (in, out)": (OfTorch, lambda m: without(divided(arrays_of(m)), "counts"), "relu"),
    "scale and shift, a mask": (
        lambda: Scratch(True),
        lambda m: renamed(arrays_of(m), ("trf_", "my_")),
        "gelu_new",
    ),
    "heads": (Lecture, lambda m: renamed(arrays_of(m), ("blocks", "units")), "relu"),
    "heads, scaled by width": (
        lambda: Lecture(C),
        lambda m: renamed(arrays_of(m), ("token_embedding_table", "token_embedding")),
        "relu",
    ),
    "one matrix in order": (OfTorch, lambda m: renamed(bare(m), ("in_proj_", "qkv.")), "relu"),
    "as many positions as columns": (
        OfTorch,
        lambda m: {**bare(m), "positions.weight": np.resize(m.positions.weight.detach(), (C, C))},
        "relu",
    ),
    "a tied head": (
        lambda: Nano(is_tied=True),
        lambda m: renamed(
            without(arrays_of(m), "lm_head.weight"), ("transformer.h.", "body."), ("ln_", "norm_")
        ),
        "gelu_new",
    ),
}


@pytest.mark.parametrize("kind", PROPOSED)
def test_names_that_the_shapes_leave_one_answer_for_are_written(tmp_path, kind, capsys):
    make, arrays, activation = PROPOSED[kind]
    layout = "conv1d" if "(in, out)" in kind else "linear-qkv" if "in order" in kind else "linear"
    model = made(make())
    config = RELU | {"activation_function": activation}
    config |= {"scale_attn_by_width": "width" in kind} if "heads" in kind else {}
    if "own layers" in kind:
        config = without(config, "do_layer_norm_before") | {"norm_first": True}
    folder = write_named(tmp_path, arrays(model), {}, config)
    (folder / "tensor_names.json").unlink()
    assert cli.main(["info", str(folder), "--write-names", layout]) == 0
    assert "compare it with the model's code. Names cannot show" in capsys.readouterr().err
    assert_computes(folder, model)
    assert cli.main(["info", str(folder), "--write-names", layout]) == 2
    assert "loads, as GPT-2 of tensor_names.json: it needs no other names" in capsys.readouterr().err


def test_names_are_written_in_the_order_of_the_file(tmp_path):
    """Whatever the order of sets in a process is."""
    arrays = renamed(arrays_of(made(Lecture())), ("blocks", "units"))
    folder = write_named(tmp_path, arrays, {}, RELU | {"scale_attn_by_width": False})
    written = []
    for seed in ("1", "2", "3"):
        (folder / "tensor_names.json").unlink()
        command = [sys.executable, "-m", "tinygpt", "info", str(folder), "--write-names", "linear"]
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True)
        written.append((folder / "tensor_names.json").read_text())
    assert written[0] == written[1] == written[2]
    masks = [name for name, value in json.loads(written[0]).items() if value is None]
    assert masks == [f"units.*.sa.heads.{head}.tril" for head in range(H)]


@pytest.mark.parametrize("is_link", [False, True])
def test_no_older_file_of_names_is_overwritten(tmp_path, capsys, is_link):
    folder = write_named(tmp_path, bare(made(OfTorch())), {"wte": "nowhere"})
    if is_link:
        (folder / "tensor_names.json").unlink()
        (folder / "tensor_names.json").symlink_to(folder / "elsewhere.json")
    assert cli.main(["info", str(folder), "--write-names", "linear"]) == 2
    assert "tensor_names.json is there already: move it" in capsys.readouterr().err
    assert not (folder / "elsewhere.json").exists()


def test_names_by_which_the_model_would_not_load_are_not_written(tmp_path, capsys):
    folder = write_named(tmp_path, bare(made(OfTorch())), {}, {"n_head": H})
    (folder / "tensor_names.json").unlink()
    assert cli.main(["info", str(folder), "--write-names", "linear"]) == 2
    assert "does not say all of its arithmetic: write" in capsys.readouterr().err
    assert not (folder / "tensor_names.json").exists()


def test_arithmetic_that_no_shape_shows_is_asked_for_or_told(tmp_path):
    model = made(Lecture(C))
    arrays = renamed(arrays_of(model), ("blocks", "units"))
    assert_refused(
        write_named(tmp_path / "a", arrays, UNITS), "arithmetic: write .*with scale_attn_by_width, true if"
    )
    assert_refused(
        write_named(tmp_path / "b", arrays, UNITS, {}),
        "activation_function, .*, and do_layer_norm_before, .*, and scale_attn_by_width",
    )
    config = RELU | {"scale_attn_by_width": 8}
    assert_refused(write_named(tmp_path / "c", arrays, UNITS, config), "with scale_attn_by_width, true if")
    config |= {"scale_attn_by_width": True, "do_layer_norm_before": False}
    assert_refused(
        write_named(tmp_path / "d", arrays, UNITS, config), "with do_layer_norm_before, true: a GPT-2"
    )
    torch.save(model.state_dict(), tmp_path / "model.pt")
    write_json(tmp_path / "config.json", {"scale_attn_by_width": True})
    assert any("the model's width" in quirk for quirk in assert_computes(tmp_path / "model.pt", model).quirks)


def test_names_are_proposed_for_norms_without_biases_that_config_json_says(tmp_path, capsys):
    model = made(OfTorch())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search("norm.*bias", name):
                parameter.zero_()
    arrays = {name: array for name, array in bare(model).items() if not re.search("norm.*bias", name)}
    folder = write_named(tmp_path, arrays, {}, RELU | {"bias": False})
    (folder / "tensor_names.json").unlink()
    assert cli.main(["info", str(folder), "--write-names", "linear"]) == 0, capsys.readouterr().err
    assert_computes(folder, model)


def test_heads_of_other_names_are_not_the_lectures(tmp_path):
    arrays = renamed(arrays_of(made(Lecture())), ("ffwd", "ff"))
    save_file(arrays, tmp_path / "model.safetensors")
    assert_refused(tmp_path, "of no model that is implemented", "write-names linear")


def each_layer(name, array):
    return {f"layers.{layer}.{name}": array.astype("f4") for layer in range(L)}


UNDECIDED = {
    "another tensor": (arrays_of, "counts"),
    "norms of one name": (lambda m: renamed(bare(m), ("norm1", "norm_a"), ("norm2", "norm_b")), "ln_2"),
    "two tables": (lambda m: renamed(bare(m), ("positions", "other")), "wpe"),
    "a layer less": (lambda m: without(bare(m), "layers.1.up.weight"), "missing: layers.1.up.weight"),
    "torch's own layers": (torchs_layers, "before or after its blocks: write .* with norm_first, true if"),
    "torch's own layers in an attribute": (
        lambda m: renamed(bare(m), ("attention", "b.self_attn"), ("up", "b.linear1"), ("down", "b.linear2")),
        "before or after",
    ),
    "norms without biases": (
        lambda m: {name: array for name, array in bare(m).items() if not re.search("norm.*bias", name)},
        "ln_f, which has no bias, as RMSNorm, which is no LayerNorm .bias false in config.json",
    ),
    "learned biases of scores": (
        lambda m: bare(m) | each_layer("rel_bias", np.full((T, T), 0.5)),
        "rel",
    ),
    "learned biases by the name of a mask": (
        lambda m: bare(m) | each_layer("mask", np.full((T, T), 0.5)),
        "mask",
    ),
    "a number by the name of a mask": (lambda m: bare(m) | each_layer("mask", np.ones(())), "mask"),
    "whole numbers": (lambda m: bare(m) | {"layers.0.gate": np.ones(C, "i4")}, "layers.*gate"),
    "tables by each other's words": (
        lambda m: renamed(bare(m), ("tokens.", "out_tokens."), ("head.", "classes.")),
        "lm_head",
    ),
    "a table by the word of a head": (
        lambda m: renamed(bare(m), ("tokens.", "out_embed."), ("head.", "in_embed.")),
        "lm_head",
    ),
    "a head by no word": (
        lambda m: renamed(bare(m), ("tokens.", "header_tokens."), ("head.", "classes.")),
        "lm_head",
    ),
    "tokens by the word of positions": (
        lambda m: renamed(bare(m), ("tokens.", "token_pos."), ("positions.", "time.")),
        "wpe",
    ),
    "matrices of the other layout": (lambda m: in_out(bare(m)), "c_attn"),
    "three matrices of the other layout": (
        lambda m: without(divided(arrays_of(m)), "counts"),
        "misshapen: .*bias is",
    ),
    "no output of attention": (
        lambda m: {n: a for n, a in bare(m).items() if "out_proj" not in n},
        "attention's output .nothing fits.*A model without one of them is no GPT-2",
    ),
    "rows that may be interleaved by head": (
        lambda m: renamed(bare(m), ("attention.in_proj_", "attention.query_key_value.")),
        "interleaved by head",
    ),
    "a scale of scores": (
        lambda m: bare(m) | each_layer("attention.scale", np.ones(1)),
        "attention.scale|layers.\\*.attention",
    ),
    "matrices of one name": (
        lambda m: renamed(without(divided(arrays_of(m)), "counts"), (".q.", ".a.")),
        "c_attn",
    ),
}


@pytest.mark.parametrize("kind", UNDECIDED)
def test_where_two_answers_are_left_none_is_written(tmp_path, kind, capsys):
    arrays, what = UNDECIDED[kind]
    layout = "linear"
    folder = write_named(tmp_path, arrays(made(OfTorch())), {})
    (folder / "tensor_names.json").unlink()
    assert cli.main(["info", str(folder), "--write-names", layout]) == 2
    said = capsys.readouterr().err
    assert re.search(what, said), said
    assert not (folder / "tensor_names.json").exists()


def test_transformers_model_under_a_key(tmp_path):
    transformers = pytest.importorskip("transformers", reason=MISSING)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=C, n_layer=L, n_head=H, eos_token_id=2
    )
    model = made(transformers.GPT2LMHeadModel(config))
    state = {"model_state_dict": prefixed(model, "inner."), "lr_scheduler": {"last": torch.ones(3)}}
    torch.save(state, tmp_path / "ckpt.pt")
    config.save_pretrained(tmp_path)
    checkpoint = assert_computes(tmp_path / "ckpt.pt", lambda ids: model(ids).logits)
    assert checkpoint.ignored == ("lr_scheduler.last",)


def test_names_are_proposed_for_the_model_of_a_training_checkpoint(tmp_path, capsys):
    model = made(Scratch(True))
    state = beside(model, "weights")
    state["weights"] = {name.replace("trf_", "my_"): tensor for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "ckpt.pt")
    write_json(tmp_path / "config.json", RELU | {"activation_function": "gelu_new"})
    assert_refused(tmp_path / "ckpt.pt", "write-names linear` may propose")
    assert cli.main(["info", str(tmp_path / "ckpt.pt"), "--write-names", "linear"]) == 0
    assert_computes(tmp_path / "ckpt.pt", model)


@pytest.mark.parametrize(
    ("beside", "settings"),
    [(False, {}), (0, {}), ("False", {}), *((True, {"norm_first": value}) for value in (False, "False", 0))],
)
def test_norms_after_the_blocks_are_no_gpt2s(tmp_path, beside, settings, capsys):
    """By config.json, or by the settings in the file, whatever config.json says."""
    state = {name: torch.tensor(array) for name, array in torchs_layers(made(OfTorch())).items()}
    torch.save({"model": state, "args": argparse.Namespace(**settings)}, tmp_path / "m.pt")
    write_json(tmp_path / "config.json", RELU | {"norm_first": beside})
    assert cli.main(["info", str(tmp_path / "m.pt"), "--write-names", "linear"]) == 2
    assert "has norm_first false: its layer norms come after its blocks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"norm_first": "yes"}, "has norm_first 'yes', which must be true or false"),
        ({"norm_first": None}, "write .* with norm_first, true if"),
        ({"norm_first": True, "do_layer_norm_before": "False"}, None),
        ({"norm_first": "True"}, None),
        ({"norm_first": 1}, None),
    ],
    ids=str,
)
def test_a_boolean_is_read_as_a_text_too(tmp_path, fields, sentence, capsys):
    model = made(OfTorch())
    state = {name: torch.tensor(array) for name, array in torchs_layers(model).items()}
    torch.save(state, tmp_path / "m.pt")
    write_json(tmp_path / "config.json", {"n_head": H, "activation_function": "relu"} | fields)
    code = cli.main(["info", str(tmp_path / "m.pt"), "--write-names", "linear"])
    err = capsys.readouterr().err
    if sentence is None:
        assert code == 0, err
        assert_computes(tmp_path / "m.pt", model)
    else:
        assert code == 2
        assert re.search(sentence, err)


def test_norms_that_a_text_says_come_after_the_blocks_are_asked_for(tmp_path):
    config = RELU | {"do_layer_norm_before": "False"}
    folder = write_named(tmp_path, arrays_of(made(OfTorch())), OF_TORCH, config)
    assert_refused(folder, "write .* with do_layer_norm_before, true")


@pytest.mark.parametrize("place", [lambda model: model, lambda model: {"epoch": 3, "net": model}])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_module_that_was_saved_whole_is_its_state_dict(tmp_path, place, protocol):
    """Without buffers that no state dict has, such as a mask."""
    model = made(Scratch(True))
    model.register_buffer("causal", torch.ones(T, T), persistent=False)
    torch.save(place(model), tmp_path / "model.pt", pickle_protocol=protocol)
    write_json(tmp_path / "config.json", {"n_head": H})
    assert_computes(tmp_path / "model.pt", model)


def test_a_module_that_contains_itself_is_refused(tmp_path):
    model = Scratch(True)
    model.final_norm.again = model
    torch.save(model, tmp_path / "model.pt")
    assert_refused(tmp_path / "model.pt", "modules in modules without end")


def test_tables_of_gpt2s_names_alone_are_no_gpt2(tmp_path):
    """A config.json that says one field is not blamed for others."""
    arrays = renamed(bare(made(OfTorch())), ("tokens.", "wte."), ("positions.", "wpe."))
    save_file(arrays, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"activation_function": "relu"})
    assert_refused(tmp_path, "of no model that is implemented.*write-names linear")


def test_a_program_of_torch_is_told_from_a_damaged_file(tmp_path):
    """Download it again, it said."""
    (tmp_path / "script.pt").write_bytes(script := torch_script(made(Scratch(True))))
    assert_refused(tmp_path / "script.pt", "is TorchScript, .*Save the model's state_dict.. with torch.save")
    with zipfile.ZipFile(tmp_path / "exported.pt2", "w") as archive:
        archive.writestr("exported/models/model.json", script[:9])
    assert_refused(tmp_path / "exported.pt2", "without data.pkl: .*Save the model's state_dict.. with")
