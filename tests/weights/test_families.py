"""Each program's and each family's names and layouts: the same bits, what is refused, the way back, and a new one."""

import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from support import gguf_writer
from support.family_models import FAMILY_MODELS, T, V, write_family
from support.foreign import GGUF_KEYS, WRITERS, gguf_name, linear, nanogpt_state
from support.golden_models import golden_ids
from support.oracles import TOLERANCE, family_logits_of
from support.processes import Result
from support.recorded import MISSING
from support.tables import rows
from support.tiny_checkpoint import (
    CONFIG,
    LAYERS,
    C,
    assert_holds,
    assert_refused,
    assert_same,
    convert,
    random_tensors,
    write_checkpoint,
    write_json,
)
from support.torch_files import Call, own_bytes
from tinygpt import LLM
from tinygpt.engine.model_runner import load_tokenizer
from tinygpt.errors import CheckpointError, NoTokenizerError, RequestError
from tinygpt.weights import matching
from tinygpt.weights.checkpoint import read_config
from tinygpt.weights.config import HEAD, ModelConfig, is_transposed, parameter_shapes
from tinygpt.weights.families.family import (
    AS_IS,
    TRANSPOSED,
    Family,
    TensorRule,
    Transform,
    as_is,
    qkv_by_heads,
)
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.families.transformers import WITHOUT_FIRST_ROWS
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.tensor import FILES, DefaultTensor

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
    with pytest.raises(
        CheckpointError, match=r"wpe\.weight is \(6, 8\) and the checkpoint asks for \(6, 16\)"
    ):
        open_nanogpt(tmp_path, n_embd=16)


def test_an_error_in_a_config_json_beside_is_not_laid_to_the_arguments(tmp_path):
    write_json(tmp_path / "config.json", {"activation_function": "odd"})
    message = r"^the checkpoint or config\.json cannot be used: activation_function is 'odd'"
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


TEXT = "\n !?abcDé"
STOI = {character: i for i, character in enumerate(TEXT)}
ITOS = dict(enumerate(TEXT))
TABLES = {
    "in the checkpoint": {"stoi": STOI, "itos": ITOS},
    "the way back": {"itos": ITOS},
    "in order": {"data": {"chars": list(TEXT)}},
    "a text": {"config": {"chars": TEXT}},
    "by another name": {"tokenizer": {"char_to_idx": STOI, "idx2char": list(TEXT)}},
}
TABLE_FILES = {
    "vocab.json": {"stoi": STOI, "itos": {str(i): character for i, character in ITOS.items()}},
    "vocab.pkl": {"stoi": STOI, "itos": ITOS},
    "meta.pkl": {"chars": list(TEXT), "itos": ITOS},
}
PLAIN_FILES = {"vocab.json": STOI, "vocab.pkl": list(TEXT)}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_characters_in_the_checkpoint(tmp_path, kind):
    (tmp_path / "ckpt.pt").write_bytes(own_bytes(nanogpt_state(TENSORS) | TABLES[kind]))
    assert load_tokenizer(open_checkpoint(tmp_path)).encode("cab é!") == [6, 4, 5, 1, 8, 2]


@pytest.mark.parametrize(("name", "table"), [*TABLE_FILES.items(), *PLAIN_FILES.items()])
def test_a_table_of_characters_next_to_the_checkpoint(tmp_path, name, table):
    content = json.dumps(table).encode() if name.endswith(".json") else pickle.dumps(table)
    (tmp_path / name).write_bytes(content)
    tokenizer = load_tokenizer(open_nanogpt(tmp_path))
    assert tokenizer.encode("cab é!") == [6, 4, 5, 1, 8, 2]
    assert tokenizer.decode([6, 4, 5, 1, 8, 2]) == "cab é!"


def test_a_table_with_special_tokens_next_to_gpt_2s_own_names(tmp_path):
    state = {"state_dict": random_tensors(), "stoi": {"<pad>": 0, "a": 1, "b": 2, "[EOS]": 3}}
    (tmp_path / "ckpt.pt").write_bytes(own_bytes(state))
    write_json(tmp_path / "config.json", {"n_head": 2})
    tokenizer = load_tokenizer(open_checkpoint(tmp_path))
    assert tokenizer.encode("ab<pad>b[EOS]") == [1, 2, 0, 2, 3]
    assert tokenizer.special_ids == {0, 3}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"stoi": STOI, "itos": ITOS | {3: "x"}}, "has two tables of characters that differ"),
        ({"stoi": {"a": 0, "word": 1}}, "must give each character a whole number from 0"),
        ({"itos": {"a": "b"}}, "must give each character a whole number from 0"),
    ],
)
def test_a_table_that_is_none_of_characters_is_refused(tmp_path, tables, sentence):
    (tmp_path / "ckpt.pt").write_bytes(own_bytes(nanogpt_state(TENSORS) | tables))
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(open_checkpoint(tmp_path))


def test_a_vocabulary_without_merges_is_no_table(tmp_path):
    write_json(tmp_path / "vocab.json", {"a": 0, "ab": 1})
    with pytest.raises(
        NoTokenizerError, match=r"only vocab\.json is there.* or characters as nanoGPT's meta\.pkl"
    ):
        load_tokenizer(open_nanogpt(tmp_path))


def test_mingpt_by_its_layout(tmp_path):
    checkpoint = open_checkpoint(WRITERS["mingpt"](tmp_path / "out", TENSORS))
    assert (checkpoint.family, checkpoint.tied, checkpoint.config.activation) == (
        "minGPT",
        False,
        "gelu_tanh",
    )


@pytest.mark.parametrize(
    ("model", "heads"),
    rows("""
{"model_type": "gpt-nano"} | 3
{"model_type": "gpt-x"} | null
{} | null
"""),
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


@given(st.permutations("3hd"), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_parts_become_the_parameter_that_they_were_cut_from(order, n, heads, head_size):
    """Of each transform that `convert` takes back; n parts of some heads."""
    array = np.arange(3 * n * heads * head_size * 2, dtype=np.float32).reshape(-1, 2)
    transforms = {AS_IS: 1, TRANSPOSED: 1, WITHOUT_FIRST_ROWS: 1, as_is(0): n}
    transforms[qkv_by_heads("".join(order), head_size)] = n
    for transform, count in transforms.items():
        parts = [np.array(part) for part in transform.to_parts(array, count)]
        assert [part.shape for part in parts] == [transform.stored_shape(array.shape, count)] * count
        found = transform.of(tuple(DefaultTensor(part.shape, lambda _, part=part: part) for part in parts))
        np.testing.assert_array_equal(found.float32(), array)


# Families that transformers has.

FAMILIES = {
    "opt": "OPT",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "openai-gpt": "GPT-1",
    "xglm": "XGLM",
    "biogpt": "BioGPT",
    "gpt_neo": "GPT-Neo",
}


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_safetensors_of_a_family_are_written_as_they_were(name, tmp_path):
    """The same tensors to the last bit: transformers computes the same logits."""
    source = write_family(tmp_path / "source", name)
    written = convert(source, tmp_path / "written", "--to", "safetensors")
    there, back = (load_file(folder / "model.safetensors") for folder in (source, written))
    assert there.keys() == back.keys()
    for key, array in there.items():
        skipped = 2 if key.endswith("embed_positions.weight") else 0  # rows of no position
        np.testing.assert_array_equal(back[key][skipped:], array[skipped:], err_msg=key)
    assert json.loads((written / "config.json").read_text()) == FAMILY_MODELS[name]


WRAPPERS = rows("""
opt | ["", "decoder.", "model.decoder.", "module.model.decoder.", "_orig_mod.model.decoder."]
bloom-6 | ["", "transformer.", "module.transformer."]
mpt-6 | ["", "transformer."]
gpt-1 | ["", "transformer."]
xglm | ["", "model.", "module.model."]
biogpt | ["", "biogpt.", "_orig_mod.biogpt."]
gpt-neo | ["", "transformer.", "module.transformer."]
""")


@pytest.mark.parametrize(("name", "prefixes"), WRAPPERS)
def test_any_wrapper(name, prefixes, tmp_path):
    folders = (write_family(tmp_path / str(i), name, prefix) for i, prefix in enumerate(prefixes))
    first, *others = map(open_checkpoint, folders)
    assert first.family == FAMILIES[FAMILY_MODELS[name]["model_type"]]
    for other in others:
        assert_same(first, other)


def test_the_table_of_older_releases_and_masks_are_ignored(tmp_path):
    folder = write_family(tmp_path, "xglm")
    extra = {name: np.ones(3, np.float32) for name in ("model.embed_positions.weights", "h.0.attn.bias")}
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors")
    assert sorted(open_checkpoint(folder).ignored) == sorted(extra)


@pytest.mark.parametrize("name", ["opt", "bloom-6", "mpt-6", "gpt-1", "xglm", "biogpt", "gpt-neo"])
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


REFUSED = rows(r"""
bloom-4 | {"apply_residual_connection_post_layernorm": true} | apply_residual_connection_post_layernorm is True
mpt-4 | {"attn_config": {"clip_qkv": 6}} | attn_config.clip_qkv is 6
mpt-4 | {"attn_config": {"alibi_bias_max": 16}} | attn_config.alibi_bias_max is 16
mpt-4 | {"attn_config": {"qk_ln": true}} | attn_config.qk_ln is True
mpt-4 | {"attn_config": {"alibi": false}} | attn_config.alibi is False
mpt-4 | {"attn_config": {"softmax_scale": 0.5}} | attn_config.softmax_scale is 0.5
mpt-4 | {"no_bias": false} | no_bias is False
gpt-1 | {"afn": "made_up"} | afn is 'made_up'
gpt-1 | {"n_head": 5} | cannot be divided into 5 heads
opt | {"word_embed_proj_dim": 0} | word_embed_proj_dim is 0
opt | {"do_layer_norm_before": "no"} | do_layer_norm_before is 'no'
opt | {"activation_function": "made_up"} | activation_function is 'made_up'
opt | {"hidden_size": [1]} | n_embd is \[1\]
xglm | {"add_cross_attention": true} | add_cross_attention is True
xglm | {"scale_embedding": 2} | scale_embedding is 2
xglm | {"d_model": 3} | d_model is 3 and must be a whole number from 4 to
xglm | {"max_position_embeddings": 1048576} | max_position_embeddings is 1048576 and must be
xglm | {"pad_token_id": "x"} | pad_token_id is 'x'
biogpt | {"scale_embedding": null} | scale_embedding is None
biogpt | {"hidden_act": "made_up"} | activation_function is 'made_up'
""")


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name, fields, message, tmp_path):
    folder = write_family(tmp_path, name)
    (folder / "config.json").write_text(json.dumps({**FAMILY_MODELS[name], **fields}))
    assert_refused(folder, message)


# Fields, structure, positions, and the ids of both ends: of OPT-350m, BLOOM-560m and GPT-1, and defaults.
PUBLISHED = rows("""
{"model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
  "do_layer_norm_before": false, "word_embed_proj_dim": 512, "prefix": "</s>", "layerdrop": 0.0}
  | {"norm_placement": "post", "final_norm": false, "embed_dim": 512} | 2048 | [2, [2]]
{"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
  "offset_alibi": 100, "pretraining_tp": 1, "slow_but_exact": false, "attention_softmax_in_fp32": true}
  | {"positions": "alibi", "embed_norm": true} | 2048 | [1, [2]]
{"model_type": "openai-gpt", "afn": "gelu", "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12}
  | {"norm_placement": "post", "final_norm": false} | 512 | [null, []]
{"model_type": "opt"} | {} | 2048 | [2, [2]]
{"model_type": "mpt"} | {"positions": "alibi"} | 2048 | [null, []]
{"model_type": "xglm"} | {"embed_scale": 32.0} | 2048 | [0, [2]]
{"model_type": "biogpt", "layer_norm_eps": 1e-12} | {"embed_scale": 32.0} | 1024 | [0, [2]]
""")


@pytest.mark.parametrize(("fields", "structure", "n_positions", "ends"), PUBLISHED)
def test_published_configurations(fields, structure, n_positions, ends, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    assert config.layer_norm_epsilon == 1e-5
    assert config.structure == structure
    assert (config.n_positions, config.bos_token_id, [*config.eos_token_ids]) == (n_positions, *ends)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 14, 112])
def test_slopes_are_those_of_the_paper_and_of_its_rule_for_other_numbers_of_heads(heads):
    slopes = ModelConfig(n_embd=heads, n_head=heads, positions="alibi").alibi_slopes
    power = 2 ** int(np.log2(heads))
    assert slopes[:power] == tuple(2.0 ** (-8 / power * (head + 1)) for head in range(power))
    twice = tuple(2.0 ** (-8 / (2 * power) * (head + 1)) for head in range(2 * power))
    assert slopes[power:] == twice[0::2][: heads - power]


NO_GGUF = rows("""
opt   | has the activation relu, and llama.cpp computes gelu_new for every GPT-2 and BLOOM
mpt-4 | holds MPT (positions alibi), and GGUF files are written of GPT-2, BLOOM
gpt-1 | holds GPT-1 (norm_placement post, final_norm False), and GGUF files are written of GPT-2, BLOOM
xglm  | and GGUF files are written of GPT-2, BLOOM
gpt-neo       | holds GPT-Neo (local_layers (1,), window_size 5), and GGUF files are written of GPT-2, BLOOM
gpt-neo-local | holds GPT-Neo (local_layers (0, 1), window_size 1), and GGUF files
""")


@pytest.mark.parametrize(("name", "sentence"), NO_GGUF)
def test_gguf_is_of_gpt2_and_bloom_alone(name, sentence, tmp_path, capsys):
    source = write_family(tmp_path / "source", name)
    result = Result(capsys, "convert", [str(source), str(tmp_path / "gguf"), "--to", "gguf"])
    assert result.code == 2
    assert sentence in result.err
    assert not (tmp_path / "gguf").exists()


def test_a_gpt_neo_of_global_layers_becomes_a_gpt2_of_gguf(tmp_path):
    """Its scores have no scale, and llama.cpp divides by the square root of the head size: queries make up for it."""
    source = write_family(tmp_path / "source", "gpt-neo-global")
    folder = convert(source, tmp_path / "gguf", "--to", "gguf")
    ids = golden_ids(T, vocab_size=V)
    with LLM(folder / "model.gguf", device="reference") as llm:
        assert llm.config.scale_attn_weights
        found = llm.logits(ids)
    np.testing.assert_allclose(found, family_logits_of("gpt-neo-global", ids), rtol=0, atol=TOLERANCE)


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


# A family of one's own takes a module and a line in a table, as weights/README.md says.

SKIPPED = 2  # rows of wpe that belong to no position, as OPT has them


def split_names(name):
    """Of q, k and v apart, for a name of c_attn."""
    return tuple(name.replace("c_attn", part) for part in ("q_proj", "k_proj", "v_proj"))


def rule_of(name):
    if name == "wpe.weight":
        return TensorRule(
            (name,), Transform(lambda shape, n: (shape[0] + SKIPPED, shape[1]), lambda array: array[SKIPPED:])
        )
    return TensorRule(split_names(name), as_is(0)) if ".c_attn." in name else TensorRule((name,))


# GPT-2 with queries, keys and values in matrices of their own, (out, in) all of them, and positions from 2 on.
SPLIT = Family(
    name="Split",
    described_by="config.json",
    detect=lambda source: (source.config_json or {}).get("model_type") == "split",
    config=lambda source: model_config(
        {**source.config_json, "model_type": "gpt2", "n_embd": source.config_json["width"]}
    ),
    rules=lambda source, config: {name: rule_of(name) for name in parameter_shapes(config)},
)


@pytest.fixture
def split(monkeypatch):
    """The module families/split.py, and its row in the table."""
    monkeypatch.setitem(sys.modules, "tinygpt.weights.families.split", SimpleNamespace(SPLIT=SPLIT))
    monkeypatch.setattr(matching, "OTHERS", ((SPLIT.detect, ("split.SPLIT",)), *matching.OTHERS))


def split_tensors():
    tensors = {}
    for name, array in TENSORS.items():
        array = np.ascontiguousarray(array.T) if is_transposed(name) else array
        names = split_names(name) if ".c_attn." in name else [name]
        tensors |= dict(zip(names, np.split(array, len(names)), strict=True))
    return tensors | {
        "wpe.weight": np.concatenate([np.zeros((SKIPPED, C), np.float32), TENSORS["wpe.weight"]])
    }


@pytest.mark.usefixtures("split")
def test_a_family_with_tensors_that_are_joined_and_cut(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, split_tensors(), model_type="split", width=C))
    plain = open_checkpoint(write_checkpoint(tmp_path / "plain"))
    assert (checkpoint.config, checkpoint.tied) == (plain.config, True)
    assert (checkpoint.family, plain.family) == ("Split", "GPT-2")
    assert_same(checkpoint, plain)
    for name in TENSORS:
        checkpoint.release(name)
    assert_same(checkpoint, plain)
