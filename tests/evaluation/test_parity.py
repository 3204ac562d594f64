"""Live parity with transformers (torch, CPU, float32) of every form of file: logits to 1e-4."""

import json
from pathlib import Path

import pytest

from support.recorded import MISSING

pytest.importorskip("transformers", reason=MISSING)

import torch
from transformers import GPT2LMHeadModel

from support.parity import (
    DTYPES,
    FORMS,
    PREFIXES,
    assert_same_logits,
    make_case,
    recipe,
)
from tinygpt import LLM


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_file_form_and_dtype(tmp_path, form, dtype, tied):
    check_files(tmp_path, form=form, dtype=dtype, tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda prefix: prefix or "no-prefix")
def test_every_prefix(tmp_path, prefix, form, tied):
    check_files(tmp_path, prefix=prefix, form=form, tie_word_embeddings=tied, buffers=True)


def check_files(folder: Path, **fields) -> None:
    made = make_case(recipe("files", (10, 2, 2, 37, 9), **fields), folder)
    with LLM(str(folder), device="reference") as llm:
        assert_same_logits(llm, made.model, made.random_ids(9))


FEWEST = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 30}
GENERAL = dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, max_position_embeddings=30)


@pytest.mark.parametrize("fields", [FEWEST, GENERAL], ids=["fewest", "general names"])
def test_config_json_of_old_checkpoints_and_with_general_names(fields, tmp_path):
    """transformers' defaults stand for missing fields, and it accepts hidden_size and its kind."""
    made = make_case(recipe("old", (24, 3, 2, 59, 30)), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 59, **fields}))
    model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with LLM(str(tmp_path)) as llm:
        assert_same_logits(llm, model, made.random_ids(30))
