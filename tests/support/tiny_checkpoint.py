"""A tiny random GPT-2 in a folder, as NumPy arrays with the names and layout of Hugging Face's files."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.paths import DEMO, VOCAB_SIZE
from support.tables import rows
from tinygpt.cli import main as cli
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import HEAD, is_transposed, parameter_shapes
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.open import open_checkpoint

Arrays = dict[str, np.ndarray]
V = 11
T = 6
C = 8
F = 20
LAYERS = 2
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": V,
    "n_positions": T,
    "n_embd": C,
    "n_inner": F,
    "n_layer": LAYERS,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# A letter for each size of a module's weight, as Conv1D has it, (in, out): Q that of queries, keys and values.
LAYER = rows("""
ln_1        | C
attn.c_attn | CQ
attn.c_proj | CC
ln_2        | C
mlp.c_fc    | CF
mlp.c_proj  | FC
""")


def shapes_of(
    n_embd: int, inner_size: int, n_layer: int, vocab_size: int, n_positions: int
) -> dict[str, tuple]:
    """By name, the parameters but for the head, as they lie in a file."""
    sizes = {"C": n_embd, "Q": 3 * n_embd, "F": inner_size}
    shapes = {"wte.weight": (vocab_size, n_embd), "wpe.weight": (n_positions, n_embd)}
    layers = [(f"h.{i}.{name}", letters) for i in range(n_layer) for name, letters in LAYER]
    for name, letters in [("ln_f", "C"), *layers]:
        shape = tuple(sizes[letter] for letter in letters)
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    return shapes


def random_tensors(prefix: str = "transformer.") -> Arrays:
    """Every parameter but the head."""
    generator = np.random.default_rng(0)
    shapes = shapes_of(C, F, LAYERS, V, T)
    return {prefix + name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gpt2_arrays(checkpoint: Checkpoint) -> Arrays:
    """Every parameter but the head, as GPT-2's own files have it."""
    arrays = {name: checkpoint.tensor(name) for name in checkpoint.stored if name != HEAD}
    return {
        name: np.ascontiguousarray(array.T) if is_transposed(name) else array
        for name, array in arrays.items()
    }


def assert_holds(checkpoint: Checkpoint, arrays: Arrays) -> None:
    """Compare all bits of parameters that are given as GPT-2's own files have them."""
    for name, array in arrays.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, array.T if is_transposed(name) else array, err_msg=name)


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """Compare all bits of all parameters."""
    for name in parameter_shapes(one.config):
        np.testing.assert_array_equal(one.tensor(name), other.tensor(name), err_msg=name)


def assert_same_files(one: Path, other: Path) -> None:
    """Compare the names and all bits of the tensors in the model.safetensors of two folders."""
    found, expected = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_refused(path: object, *sentences: str) -> None:
    """Assert that one error has all of these regular expressions."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    for sentence in sentences:
        assert re.search(sentence, str(error.value)), f"no {sentence} in {error.value}"


def convert(source: object, target: Path, *flags: str) -> Path:
    """The folder that `tinygpt convert` has made of a checkpoint."""
    assert cli.main(["convert", str(source), str(target), *flags]) == 0
    return target


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_config(folder: Path, **fields: object) -> None:
    write_json(folder / "config.json", {**CONFIG, **fields})


def write_checkpoint(folder: Path, tensors: Arrays | None = None, **fields: object) -> Path:
    """config.json and model.safetensors in `folder`, which is returned."""
    folder.mkdir(exist_ok=True)
    write_config(folder, **fields)
    save_file(random_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_one_layer(folder: Path, n_positions: int) -> Path:
    """The checkpoint with its first layer alone, and this many positions."""
    tensors = {name: tensor for name, tensor in random_tensors().items() if ".h.1." not in name}
    c = tensors["transformer.ln_f.weight"].size
    tensors["transformer.wpe.weight"] = np.random.default_rng(1).standard_normal((n_positions, c), np.float32)
    return write_checkpoint(folder, tensors, n_positions=n_positions, n_layer=1)


def copy_tokenizer(folder: Path) -> Path:
    """Put the demo's tokenizer into `folder`, which is returned."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(DEMO / name, folder / name)
    return folder


def write_with_demo_tokenizer(folder: Path, added: Mapping[str, int] | None = None) -> Path:
    """A checkpoint that has the demo's tokenizer, as many rows as that has tokens, and 40 positions.

    added: added tokens, by their texts.
    """
    generator = np.random.default_rng(1)
    rows = {"transformer.wte.weight": VOCAB_SIZE, "transformer.wpe.weight": 40}
    tensors = random_tensors() | {
        name: generator.standard_normal((n, C), np.float32) for name, n in rows.items()
    }
    write_checkpoint(folder, tensors, vocab_size=VOCAB_SIZE, n_positions=40)
    copy_tokenizer(folder)
    if added:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    return folder


def write_damaged(folder: Path) -> Path:
    """A checkpoint whose positions 3 and later are not numbers."""
    tensors = random_tensors()
    tensors["transformer.wpe.weight"][3:] = np.nan
    return write_checkpoint(folder, tensors)
