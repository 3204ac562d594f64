"""Every form of checkpoint file gives the same parameters, and what does not fit is said all at once."""

import json
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from support.recorded import HAS_TRANSFORMERS, MISSING, needs_transformers
from support.tables import column, rows
from support.tiny_checkpoint import (
    CONFIG,
    C,
    assert_holds,
    assert_refused,
    random_tensors,
    write_checkpoint,
    write_config,
    write_json,
)
from support.torch_files import own_bytes
from tinygpt.errors import CheckpointError
from tinygpt.weights.config import is_transposed
from tinygpt.weights.families.gpt2 import canonical_name
from tinygpt.weights.open import DEMO, open_checkpoint
from tinygpt.weights.tensor import MappedFile

if HAS_TRANSFORMERS:
    import torch
    from safetensors.torch import save_file as save_torch_file
else:
    save_torch_file = save_file  # of NumPy arrays, in the same format

TENSORS = random_tensors(prefix="")
DTYPES = ("float32", "float16", "bfloat16", "float64")


def torch_tensors(prefix="transformer.", dtype="float32"):
    if not HAS_TRANSFORMERS:
        if dtype == "bfloat16":
            pytest.skip(MISSING)
        return {prefix + name: array.astype(dtype) for name, array in TENSORS.items()}
    return {
        prefix + name: torch.from_numpy(array).to(getattr(torch, dtype)) for name, array in TENSORS.items()
    }


def save_bin(tensors, path, is_legacy=False):
    if HAS_TRANSFORMERS:
        torch.save(tensors, path, _use_new_zipfile_serialization=not is_legacy)
    else:
        path.write_bytes(own_bytes(tensors, is_legacy))


def save_shards(folder, tensors, save=save_torch_file, stem="model", ending="safetensors"):
    names = sorted(tensors)
    weight_map = {name: f"{stem}-{1 + i % 3:05}-of-00003.{ending}" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_json(folder / f"{stem}.{ending}.index.json", {"metadata": {}, "weight_map": weight_map})


SAVERS = {
    "whole": lambda folder, tensors: save_torch_file(tensors, folder / "model.safetensors"),
    "shards": save_shards,
    "zip": lambda folder, tensors: save_bin(tensors, folder / "pytorch_model.bin"),
    "legacy": lambda folder, tensors: save_bin(tensors, folder / "pytorch_model.bin", is_legacy=True),
    "bin shards": lambda folder, tensors: save_shards(folder, tensors, save_bin, "pytorch_model", "bin"),
}


def float32_of(tensor):
    return tensor.float().numpy() if HAS_TRANSFORMERS else tensor.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save", SAVERS)
def test_every_form_and_dtype_holds_the_same_parameters(tmp_path, save, dtype):
    write_config(tmp_path)
    SAVERS[save](tmp_path, torch_tensors(dtype=dtype))
    checkpoint = open_checkpoint(tmp_path)
    rounded = torch_tensors(prefix="", dtype=dtype)
    assert_holds(checkpoint, {name: float32_of(tensor) for name, tensor in rounded.items()})
    assert checkpoint.tied
    assert checkpoint.ignored == ()
    assert checkpoint.path == tmp_path


def test_float32_is_not_copied_and_may_be_written_without_touching_the_file(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path))
    array = checkpoint.tensor("h.0.attn.c_attn.weight")
    assert np.shares_memory(array, checkpoint.tensor("h.0.attn.c_attn.weight"))
    assert array.flags.writeable
    array[:] = 0
    assert checkpoint.tensor("h.0.attn.c_attn.weight")[0, 0] == 0
    assert_holds(open_checkpoint(tmp_path), TENSORS)


def test_a_released_tensor_can_be_read_again(tmp_path):
    tensors = random_tensors() | {
        "transformer.wte.weight": np.arange(4000 * C, dtype=np.float32).reshape(4000, C)
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, vocab_size=4000))
    array = checkpoint.tensor("wte.weight")
    array[2000] = -1  # a private page: it is gone after the release, and the file's own comes back
    for name in ("wte.weight", "lm_head.weight", "ln_f.bias"):
        checkpoint.release(name)
    np.testing.assert_array_equal(array, tensors["transformer.wte.weight"])


def test_tensors_that_are_not_aligned_are_copied(tmp_path):
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor("wte.weight").flags.aligned
    assert_holds(checkpoint, TENSORS)


@needs_transformers
@pytest.mark.parametrize("save", ["zip", "legacy"])
def test_views_parameters_and_shared_storages_of_a_state_dict(tmp_path, save):
    write_config(tmp_path)
    tensors = torch_tensors()
    wide = torch.arange(40.0).reshape(5, 8)
    tensors["transformer.ln_f.weight"] = wide[2]
    tensors["transformer.ln_f.bias"] = wide[:, 3].repeat(2)[:8][::2].repeat(2)
    tensors["transformer.h.0.attn.c_proj.weight"] = torch.randn(8, 8).t()
    tensors["transformer.h.0.ln_1.weight"] = torch.arange(16.0)[::2]
    tensors["transformer.h.0.ln_1.bias"] = torch.zeros(1).expand(8)
    tensors["transformer.h.0.ln_2.weight"] = torch.nn.Parameter(torch.randn(8))
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    SAVERS[save](tmp_path, OrderedDict(tensors))
    checkpoint = open_checkpoint(tmp_path)
    expected = {
        name.removeprefix("transformer."): tensor.detach().numpy() for name, tensor in tensors.items()
    }
    assert_holds(checkpoint, expected)
    assert checkpoint.tied


WRAPPERS = st.lists(st.sampled_from(["transformer.", "model.", "module.", "_orig_mod."]), max_size=5)


@given(wrappers=WRAPPERS, name=st.sampled_from([*TENSORS, "lm_head.weight"]))
def test_wrappers_are_taken_off_in_any_order(wrappers, name):
    assert canonical_name("".join(wrappers) + name) == name


def test_masks_and_heads_of_other_tasks_are_ignored_by_name(tmp_path):
    extra = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 6, 6), np.uint8),
        "transformer.h.1.attn.masked_bias": np.array(-1e4, np.float32),
        "multiple_choice_head.summary.weight": np.ones((1, C), np.float32),
        "score.weight": np.ones((2, C), np.float32),
        "v_head.summary.bias": np.ones(1, np.float32),
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, random_tensors() | extra))
    assert sorted(checkpoint.ignored) == sorted(extra)


def lm_heads():
    wte = TENSORS["wte.weight"]
    return {"absent": None, "equal": wte.copy(), "different": wte + 1}


@needs_transformers
@pytest.mark.parametrize("save", ["whole", "zip"])
@pytest.mark.parametrize("head", lm_heads())
@pytest.mark.parametrize("tie", [True, False])
def test_head_is_the_one_transformers_uses(tmp_path, tie, head, save):
    from transformers import GPT2LMHeadModel

    tensors = torch_tensors()
    if lm_heads()[head] is not None:
        tensors["lm_head.weight"] = torch.from_numpy(lm_heads()[head])
    write_config(tmp_path, tie_word_embeddings=tie)
    save_torch_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    (tmp_path / "model.safetensors").unlink()
    SAVERS[save](tmp_path, tensors)
    if info["missing_keys"]:
        assert_refused(tmp_path, r"missing: lm_head\.weight")
        return
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), theirs.lm_head.weight.detach().numpy())
    np.testing.assert_array_equal(checkpoint.tensor("wte.weight"), TENSORS["wte.weight"])
    assert checkpoint.tied == (tie and head != "different")


def test_a_tied_matrix_may_be_kept_as_the_head(tmp_path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors))
    assert_holds(checkpoint, TENSORS)
    assert checkpoint.tied
    write_config(tmp_path, tie_word_embeddings=False)
    assert_refused(tmp_path, r"missing: wte\.weight")


def test_one_error_lists_everything_that_does_not_fit(tmp_path):
    tensors = random_tensors()
    del tensors["transformer.h.1.ln_1.weight"], tensors["transformer.ln_f.bias"]
    tensors["transformer.h.0.attn.c_attn.weight"] = np.zeros((C, C), np.float32)
    tensors["transformer.h.0.mlp.c_fc.bias"] = np.zeros(CONFIG["n_inner"], np.int8)
    tensors["transformer.h.2.ln_1.weight"] = np.zeros(C, np.float32)
    tensors["odd one"] = np.zeros(1, np.float32)
    tensors["module.wpe.weight"] = tensors["transformer.wpe.weight"].copy()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(write_checkpoint(tmp_path, tensors))
    _, *lines, of_names, advice = str(error.value).splitlines()
    assert "tensor_names.json may give them" in of_names
    assert sorted(lines) == [
        "  misshapen: h.0.attn.c_attn.weight is (8, 8) and config.json asks for (8, 24)",
        "  missing: h.1.ln_1.weight; ln_f.bias",
        "  of a dtype that is not implemented: h.0.mlp.c_fc.bias is I8",
        "  unexpected: odd one; transformer.h.2.ln_1.weight; transformer.wpe.weight (a second wpe.weight)",
    ]
    assert advice.startswith("Download")


def sharded(folder, **changes):
    write_config(folder)
    save_shards(folder, torch_tensors())
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    write_json(index, {"weight_map": weight_map | changes})
    return folder


NO_NAMES = r"""
"../x.safetensors" | "/etc/passwd" | "a/b" | "a\\b" | "C:x" | "" | "." | ".." | 3 | null
"*" | "model-?.safetensors" | "[a-z].safetensors" | "a\nb" | "a\u0000b" | "\ud800"
"""
UNLIKE_A_NAME = [*sum(rows(NO_NAMES), ()), "x" * 256, "\xe9" * 128]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x": "lost.safetensors"}, r"not there: lost\.safetensors"),
        ({f"x{i}": f"{i}.safetensors" for i in range(1001)}, "at most 1000 are believed"),
        *(({"x": shard}, "no file name in its own folder") for shard in UNLIKE_A_NAME),
    ],
)
def test_an_index_that_cannot_be_true(tmp_path, changes, sentence):
    assert_refused(sharded(tmp_path, **changes), sentence)


@pytest.mark.parametrize(
    "index",
    column("""
{}
{"weight_map": []}
{"weight_map": {}}
{"weight_map": "x"}
"""),
)
def test_an_index_without_a_weight_map(tmp_path, index):
    write_config(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", index)
    assert_refused(tmp_path, "weight_map")


def test_model_names_that_are_no_checkpoint(tmp_path):
    nested = tmp_path / "nested"
    (nested / "checkpoint-5").mkdir(parents=True)
    write_config(nested / "checkpoint-5")
    (nested / "tf_model.h5").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    many = tmp_path / "many"
    for i in range(1, 41):
        (many / f"c{i}").mkdir(parents=True)
        if i <= 15:
            write_config(many / f"c{i}")
    config_only = tmp_path / "config_only"
    config_only.mkdir()
    write_config(config_only)
    for model, sentence in {
        tmp_path / "absent": "there is no folder",
        "~nobody-of-this-name/x": "cannot be read",
        "./a/b/c": "there is no folder",
        tmp_path / ("long" * 100): "cannot be read|there is no folder",  # as pathlib has it
        tmp_path / "empty": "it is empty",
        nested: r"it holds checkpoint-5/, tf_model\.h5\. Its subfolders checkpoint-5 look like checkpoints",
        many: r"it holds c1/, c10/, .* and 28 more\. Its subfolders c1, c10, c11 and 12 more look",
        config_only: r"holds no weights \(it holds config\.json\)",
        "": "must be 'demo'",
        3: "must be 'demo'",
        None: "must be 'demo'",
    }.items():
        assert_refused(model, sentence)


def test_the_demo_is_found_however_it_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "Demo", "DEMO", "demo ", " demo"):
        assert open_checkpoint(name).path == DEMO
    write_checkpoint(tmp_path / "Demo")
    assert open_checkpoint("Demo").path.resolve() == tmp_path / "Demo"
    assert open_checkpoint("demo").path == DEMO


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must hold an object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"n_embd": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
    ids=["empty", "truncated", "list", "not utf-8", "deep", "huge number"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_damaged_json(tmp_path, name, data, sentence):
    write_checkpoint(tmp_path)
    if name.endswith(".index.json"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(data)
    assert_refused(tmp_path, sentence)


def test_an_empty_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match="is empty"):
        MappedFile(path)


def other_name(name: str) -> str:
    return "gpt/" + name.replace("h.", "block").replace(".", "/")


@pytest.mark.parametrize("is_linear", [False, True], ids=["conv1d", "linear"])
def test_tensor_names_json_maps_other_names(tmp_path, is_linear):
    """Matrices (in, out), or of nn.Linear (out, in): then config.json has no model_type, as minGPT's has none."""
    arrays = {
        n: np.ascontiguousarray(a.T) if is_linear and is_transposed(n) else a for n, a in TENSORS.items()
    }
    save_file({other_name(name): array for name, array in arrays.items()}, tmp_path / "model.safetensors")
    write_json(
        tmp_path / "config.json", {"n_head": 2, "activation_function": "gelu_new"} if is_linear else CONFIG
    )
    if not is_linear:
        assert_refused(tmp_path, "unexpected: gpt/block0/", "tensor_names.json may give them")
    names = {other_name(name): f"transformer.{name}" for name in TENSORS}
    write_json(tmp_path / "tensor_names.json", names)
    assert_holds(open_checkpoint(tmp_path), TENSORS)


MISFITS = rows(r"""
{"gpt/wtf": "wte.weight"} | names tensors that the files lack: gpt/wtf
{"gpt/wpe/weight": 3} | gives no text for: gpt/wpe/weight
{"gpt/wpe/weight": null} | missing: wpe.weight
{"gpt/wpe/weight": "wte.weight"} | gives one name to several: wte.weight
{"gpt/wpe/weight": "wqe.weight"} | missing: wpe.weight\n  unexpected: wqe.weight
""")


@pytest.mark.parametrize(("change", "says"), MISFITS)
def test_a_tensor_names_json_that_does_not_fit_is_refused(tmp_path, change, says):
    save_file({other_name(name): array for name, array in TENSORS.items()}, tmp_path / "model.safetensors")
    write_config(tmp_path)
    write_json(tmp_path / "tensor_names.json", {**{other_name(name): name for name in TENSORS}, **change})
    assert_refused(tmp_path, says)
