"""The work of a pass, counted by hand for GPT-2 124M and a tiny model."""

import numpy as np
import pytest

from support.bench_records import TINY
from support.family_models import FAMILY_MODELS, write_family
from support.moe_models import moe_arrays, write_moe
from tinygpt.bench import work
from tinygpt.weights.config import ModelConfig, parameter_shapes
from tinygpt.weights.open import open_checkpoint


def test_work_of_a_tiny_model():
    # A layer: 4 x 12 + 4 x 4 + 4 x 6 + 6 x 4 weights, 12 + 4 + 6 + 4 biases, 2 norms of 8.
    assert work.block_weights(TINY) == 2 * 112
    assert work.num_parameters(TINY) == 2 * (112 + 26 + 16) + 10 * 4 + 5 * 4 + 8
    assert work.weight_bytes(TINY, "float32") == 4 * (224 + 40)
    assert work.weight_bytes(TINY, "int4", 3, 2) == 3 * 0.625 * 224 + 2 * 40
    assert work.model_bytes(TINY, "bfloat16") == 2 * (224 + 40) + 4 * (2 * 42 + 20 + 8)
    assert work.kv_cache_bytes(TINY, "bfloat16", 7) == 7 * 2 * 2 * 4 * 2
    assert work.kv_cache_bytes(TINY, "int8", 7) == 7 * 2 * 2 * (4 + 4)  # a scale of the one head
    assert work.block_operations(TINY, 3, 5) == 3 * (2 * 224 + 2 * 5 * 2 * 4 * 2)
    assert work.head_operations(TINY, 3) == 3 * 2 * 40


def test_work_of_gpt2():
    assert work.weight_bytes(ModelConfig(), "float32") == 4 * (124_439_808 - 1024 * 768 - 121_344)
    assert work.block_operations(ModelConfig(), 1, 0) == 2 * 84_934_656


def test_an_untied_head_is_counted():
    untied = ModelConfig(**{**vars(TINY), "tie_word_embeddings": False})
    assert work.num_parameters(untied) - work.num_parameters(TINY) == 40
    assert work.model_bytes(untied, "int4") - work.model_bytes(TINY, "int4") == 40
    assert work.weight_bytes(untied, "int4") == work.weight_bytes(TINY, "int4")


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_parameters_of_other_families(name, tmp_path):
    """All that are in the files, and zeros and ones for what they leave out; a table of positions begins at row 2."""
    checkpoint = open_checkpoint(write_family(tmp_path, name))
    count = sum(np.prod(shape) for shape in parameter_shapes(checkpoint.config).values())
    tied = checkpoint.tensor("wte.weight").size if checkpoint.tied else 0
    assert work.num_parameters(checkpoint.config) == count - tied


def test_parameters_of_experts(tmp_path):
    arrays = moe_arrays()
    assert work.num_parameters(open_checkpoint(write_moe(tmp_path, arrays)).config) == sum(
        a.size for a in arrays.values()
    )
