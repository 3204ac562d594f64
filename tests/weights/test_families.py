"""One model, as each program would have written it: the same parameters, to the bit, and what each leaves unsaid."""

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from support import gguf_writer
from support.foreign import GGUF_KEYS, WRITERS, gguf_name, linear, nanogpt_state
from support.tiny_checkpoint import CONFIG, LAYERS, assert_holds, assert_refused, random_tensors, write_json
from support.torch_files import Call, own_bytes
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.weights.config import HEAD
from tinygpt.weights.containers.mapped_file import FILES
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")
SIZES = ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer")


def same_bits(checkpoint, expected):
    assert len(expected) == 4 + 12 * LAYERS
    assert_holds(checkpoint, expected)
    np.testing.assert_array_equal(checkpoint.tensor(HEAD), expected["wte.weight"])


@pytest.mark.parametrize("form", WRITERS)
def test_one_model_is_the_same_bits_in_every_form(tmp_path, form):
    checkpoint = open_checkpoint(WRITERS[form](tmp_path / "there", TENSORS))
    same_bits(checkpoint, TENSORS)
    assert [getattr(checkpoint.config, name) for name in SIZES] == [CONFIG[name] for name in SIZES]
    assert checkpoint.config.inner_size == CONFIG["n_inner"]
    for name in TENSORS:
        checkpoint.release(name)
    same_bits(checkpoint, TENSORS)


def test_what_a_file_is_called_says_nothing(tmp_path):
    """By itself, and in a folder under one of the names that Hugging Face has for another format."""
    for form in ("hugging_face", "nanogpt", "nanogpt_legacy", "mingpt", "gguf", "nemo", "onnx"):
        there = WRITERS[form](tmp_path / form, TENSORS)
        file = max((path for path in (tmp_path / form).iterdir()), key=lambda path: path.stat().st_size)
        for name in ("model.safetensors", "weights", "x.gguf", "x.onnx", "pytorch_model.bin"):
            file = file.rename(file.with_name(name))
            same_bits(open_checkpoint(file), TENSORS)
            is_strict = name == "pytorch_model.bin" and form.startswith("nanogpt")  # it holds the model alone
            if name in FILES and not is_strict:
                same_bits(open_checkpoint(file.parent), TENSORS)
        assert there.exists() == there.is_dir()


def resident(files):
    """Bytes of these files that are mapped into this process and in memory."""
    size, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # of another mapping
            is_wanted = any(line.endswith(f" {file}") for file in files)
        elif is_wanted and name == "Rss:":
            size += 1024 * int(rest.split()[0])
    return size


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
@pytest.mark.parametrize("form", ["nanogpt", "nanogpt_legacy", "megatron", "nemo", "fastertransformer"])
def test_no_page_of_an_opened_file_stays_in_memory(tmp_path, form):
    """Where one byte is touched, systems may put megabytes around it, and headers lie in hundreds of places."""
    checkpoint = open_checkpoint(WRITERS[form](tmp_path, TENSORS))
    assert resident(checkpoint.files) == 0
    checkpoint.tensor("wte.weight").sum()
    assert resident(checkpoint.files) > 0


def open_nanogpt(folder, arrays=TENSORS, save=own_bytes, **arguments):
    (folder / "ckpt.pt").write_bytes(save(nanogpt_state(arrays, **arguments)))
    return open_checkpoint(folder / "ckpt.pt")


def test_nanogpt_says_what_it_ignores_and_assumes(tmp_path):
    checkpoint = open_nanogpt(tmp_path)
    assert (checkpoint.family, checkpoint.container, checkpoint.tied) == ("nanoGPT", "torch zip", True)
    assert sorted(checkpoint.ignored) == [
        "best_val_loss",
        "model.transformer.h.0.attn.bias",
        "optimizer.state.0.exp_avg",
        "optimizer.state.0.step",
    ]
    assert checkpoint.quirks == ("activation_function is gelu, which the checkpoint does not say",)
    assert (checkpoint.config.activation, checkpoint.config.bos_token_id) == ("gelu", None)


def test_a_config_json_says_which_activation_an_old_nanogpt_had(tmp_path):
    write_json(tmp_path / "config.json", {"activation_function": "gelu_new", "n_layer": 99})
    checkpoint = open_nanogpt(tmp_path)
    assert (checkpoint.config.activation, checkpoint.config.n_layer) == ("gelu_tanh", LAYERS)


def test_a_nanogpt_without_biases_has_zeros_for_them(tmp_path):
    arrays = {name: array for name, array in TENSORS.items() if not name.endswith(".bias")}
    checkpoint = open_nanogpt(tmp_path, arrays, bias=False)
    biases = {name: np.zeros_like(array) for name, array in TENSORS.items() if name.endswith(".bias")}
    same_bits(checkpoint, arrays | biases)
    assert "which the files leave out" in checkpoint.quirks[0]


@pytest.mark.parametrize(
    "kind", ["torch._utils _rebuild_qtensor", "torch._utils _rebuild_sparse_tensor", "torch.nn DTensor"]
)
def test_a_tensor_of_a_kind_that_cannot_be_read_is_not_lost(tmp_path, kind):
    """A head that vanished would be tied."""
    state = nanogpt_state(TENSORS)
    state["model"]["lm_head.weight"] = Call(kind, 1, 2)
    state["optimizer"]["more"] = Call(kind)
    (tmp_path / "ckpt.pt").write_bytes(own_bytes(state))
    assert_refused(
        tmp_path, f"of a dtype that is not implemented: lm_head.weight is {kind.replace(' ', '.')}\n"
    )


def test_arguments_and_tensors_that_disagree_are_refused_with_both(tmp_path):
    with pytest.raises(CheckpointError, match=r"wpe\.weight is \(6, 8\) and model_args asks for \(7, 8\)"):
        open_nanogpt(tmp_path, block_size=7)


def test_an_error_in_a_config_json_beside_is_not_laid_to_the_arguments(tmp_path):
    write_json(tmp_path / "config.json", {"activation_function": "odd"})
    message = r"^model_args or config\.json cannot be used: activation_function is 'odd'"
    with pytest.raises(CheckpointError, match=message):
        open_nanogpt(tmp_path)


def write_meta(path, text="\n !?abcDé"):
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {
        "vocab_size": len(text),
        "itos": dict(enumerate(text)),
        "stoi": {c: i for i, c in enumerate(text)},
    }
    path.write_bytes(pickle.dumps(meta))


@pytest.mark.parametrize("place", ["out/meta.pkl", "data/shakespeare_char/meta.pkl"])
def test_the_tokenizer_of_a_model_of_characters(tmp_path, place):
    (tmp_path / "out").mkdir()
    write_meta(tmp_path / place)
    tokenizer = load_tokenizer(open_nanogpt(tmp_path / "out"))
    assert tokenizer.encode("cab é!") == [6, 4, 5, 1, 8, 2]
    assert tokenizer.decode([6, 4, 5, 1, 8, 2, 99]) == "cab é!"
    assert (tokenizer.vocab_size, len(tokenizer), tokenizer.eos_token_id) == (9, 9, None)
    assert tokenizer.token_bytes(8) == "é".encode()
    with pytest.raises(RequestError, match="no token for 'x', 'z'"):
        tokenizer.encode("azbx")


def test_mingpt_by_its_layout(tmp_path):
    checkpoint = open_checkpoint(WRITERS["mingpt"](tmp_path / "out", TENSORS))
    assert (checkpoint.family, checkpoint.tied, checkpoint.config.activation) == (
        "minGPT",
        False,
        "gelu_tanh",
    )


@pytest.mark.parametrize(
    ("model", "heads"), [({"model_type": "gpt-nano"}, 3), ({"model_type": "gpt-x"}, None), ({}, None)]
)
def test_mingpt_whose_heads_its_config_json_tells_by_a_name(tmp_path, model, heads):
    folder = WRITERS["mingpt"](tmp_path / "out", TENSORS)
    write_json(folder / "config.json", {"model": model})
    assert_refused(
        folder, "cannot be divided into 3 heads" if heads else r"does not say how many heads .*config\.json"
    )


@pytest.mark.parametrize("name", ["ckpt.pt", "model.gguf"])
def test_heads_that_no_file_tells_are_asked_for_and_not_guessed(tmp_path, name):
    state = nanogpt_state(TENSORS)
    keys = {k: v for k, v in GGUF_KEYS.items() if not k.endswith(".head_count")}
    del state["model_args"]["n_head"]
    tensors = {gguf_name(name): gguf_writer.plain(array) for name, array in linear(TENSORS).items()}
    path = tmp_path / name
    path.write_bytes(own_bytes(state) if name == "ckpt.pt" else gguf_writer.gguf_bytes(keys, tensors))
    assert_refused(
        path, re.escape(f"does not say how many heads its model has: write {tmp_path / 'config.json'}")
    )
    write_json(tmp_path / "config.json", {"n_head": CONFIG["n_head"]})
    checkpoint = open_checkpoint(path)
    same_bits(checkpoint, TENSORS)
    assert checkpoint.config.n_head == CONFIG["n_head"]
