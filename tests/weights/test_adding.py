"""Adding a family or a container takes a module and a line in a table, as weights/README.md says."""

import numpy as np
import pytest

from support.tiny_checkpoint import C, T, random_tensors, write_checkpoint
from tinygpt.errors import CheckpointError
from tinygpt.weights.config import is_transposed, parameter_shapes
from tinygpt.weights.families import table
from tinygpt.weights.families.family import Family, TensorRule, Transform, as_is
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.open import open_checkpoint

TENSORS = random_tensors(prefix="")
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
    monkeypatch.setattr(table, "OTHERS", (SPLIT, *table.OTHERS))


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
    for name in [*TENSORS, "lm_head.weight"]:
        np.testing.assert_array_equal(checkpoint.tensor(name), plain.tensor(name), err_msg=name)
        checkpoint.release(name)
        np.testing.assert_array_equal(checkpoint.tensor(name), plain.tensor(name), err_msg=name)


@pytest.mark.usefixtures("split")
def test_what_does_not_fit_it_is_named_as_the_files_have_it(tmp_path):
    tensors = split_tensors() | {"wpe.weight": TENSORS["wpe.weight"]}
    del tensors["h.1.attn.k_proj.bias"]
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(write_checkpoint(tmp_path, tensors, model_type="split", width=C))
    assert "does not hold the Split that" in str(error.value)
    assert "missing: h.1.attn.k_proj.bias" in str(error.value)
    assert f"wpe.weight is ({T}, {C}) and config.json asks for ({T + SKIPPED}, {C})" in str(error.value)
