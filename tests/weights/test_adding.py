"""Adding an architecture or a container takes a module and a line in a table, as weights/README.md says."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.tiny_checkpoint import LAYERS, C, T, random_tensors, write_checkpoint, write_config
from tinygpt.errors import CheckpointError
from tinygpt.weights.architectures import ARCHITECTURES, gpt2
from tinygpt.weights.containers import CONTAINERS
from tinygpt.weights.containers.container import Container
from tinygpt.weights.open import open_checkpoint
from tinygpt.weights.tensor import Derived

TENSORS = random_tensors(prefix="")
SKIPPED = 2  # rows of wpe that belong to no position, as OPT has them


def split_names(name):
    """Of q, k and v apart, for a name of c_attn."""
    return [name.replace("c_attn", part) for part in ("q_proj", "k_proj", "v_proj")]


def is_joined(name):
    return ".c_attn." in name


class Split:
    """GPT-2 with queries, keys and values in matrices of their own, (out, in) all of them, and positions from 2 on."""

    NAME = "Split"
    canonical_name, is_ignored = staticmethod(gpt2.canonical_name), staticmethod(gpt2.is_ignored)

    def model_config(self, fields, generation):
        return gpt2.model_config({**fields, "n_embd": fields["width"]}, generation)

    def is_transposed(self, name):
        return False

    def stored_shapes(self, config):
        shapes = {}
        for name, shape in gpt2.stored_shapes(config).items():
            shape = shape[::-1] if gpt2.is_transposed(name) else shape
            names = split_names(name) if is_joined(name) else [name]
            shapes |= dict.fromkeys(names, (shape[0] // len(names), *shape[1:]))
        return shapes | {"wpe.weight": (config.n_positions + SKIPPED, config.n_embd)}

    def parameter(self, name, stored):
        if is_joined(name):
            return Derived(lambda *parts: np.concatenate(parts), tuple(stored[part] for part in split_names(name)))
        return Derived(lambda array: array[SKIPPED:], (stored[name],)) if name == "wpe.weight" else stored[name]


def split_tensors():
    tensors = {}
    for name, array in TENSORS.items():
        array = np.ascontiguousarray(array.T) if gpt2.is_transposed(name) else array
        tensors |= dict(zip(split_names(name), np.split(array, 3), strict=True)) if is_joined(name) else {name: array}
    return tensors | {"wpe.weight": np.concatenate([np.zeros((SKIPPED, C), np.float32), TENSORS["wpe.weight"]])}


def test_an_architecture_with_tensors_that_are_joined_and_cut(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "split", Split())
    fields = {"model_type": "split", "width": C}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, split_tensors(), **fields))
    plain = open_checkpoint(write_checkpoint(tmp_path / "plain"))
    assert (checkpoint.config, checkpoint.tied) == (plain.config, True)
    for name in [*TENSORS, "lm_head.weight"]:
        np.testing.assert_array_equal(checkpoint.tensor(name), plain.tensor(name), err_msg=name)
        checkpoint.release(name)
        np.testing.assert_array_equal(checkpoint.tensor(name), plain.tensor(name), err_msg=name)


def test_what_does_not_fit_it_is_named_as_the_files_have_it(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "split", Split())
    tensors = split_tensors() | {"wpe.weight": TENSORS["wpe.weight"]}
    del tensors["h.1.attn.k_proj.bias"]
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(write_checkpoint(tmp_path, tensors, model_type="split", width=C))
    assert "does not hold the Split that" in str(error.value)
    assert "missing: h.1.attn.k_proj.bias" in str(error.value)
    assert f"wpe.weight is ({T}, {C}) and config.json asks for ({T + SKIPPED}, {C})" in str(error.value)


@dataclass(frozen=True)
class ScaledTensor:
    """Elements as int8 with one scale, which is no array of floats anywhere in the file."""

    path: Path
    values: np.ndarray
    scale: float
    dtype = "scaled8"
    is_floating = True

    @property
    def shape(self):
        return self.values.shape

    def float32(self):
        return self.values * np.float32(self.scale)

    def release(self):
        pass


def read_npz(path):
    with np.load(path) as arrays:
        return Container({name: ScaledTensor(path, arrays[name], 0.5) for name in arrays.files})


def test_a_container_whose_tensors_are_no_arrays_of_floats(tmp_path, monkeypatch):
    monkeypatch.setitem(CONTAINERS, "weights.npz", read_npz)
    write_config(tmp_path)
    values = {name: np.rint(array * 10).astype(np.int8) for name, array in TENSORS.items()}
    np.savez(tmp_path / "weights.npz", **values)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.stored) == 4 + 12 * LAYERS
    for name, array in values.items():
        expected = np.float32(0.5) * (array.T if gpt2.is_transposed(name) else array)
        np.testing.assert_array_equal(checkpoint.tensor(name), expected, err_msg=name)
    (tmp_path / "weights.npz").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.npz, weights\.npz\.index\.json"):
        open_checkpoint(tmp_path)
