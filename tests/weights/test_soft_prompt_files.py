"""Soft prompts: what PEFT writes is read to the arrays that PEFT itself would put in front of a text."""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.golden_models import NEED_PEFT, change_config, change_tensors
from support.recorded import MISSING
from support.tables import rows
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.peft import read_soft_prompt
from tinygpt.weights.config import ModelConfig

peft = pytest.importorskip("peft", reason=NEED_PEFT)
torch = pytest.importorskip("torch", reason=MISSING)
transformers = pytest.importorskip("transformers", reason=MISSING)

pytestmark = pytest.mark.filterwarnings("ignore:::transformers")
P = 5
L = 3
H = 2
D = 4
CONFIG = ModelConfig(vocab_size=23, n_positions=16, n_embd=H * D, n_layer=L, n_head=H)
TUNINGS = {
    "prompt-tuning": (peft.PromptTuningConfig, {}),
    "p-tuning-mlp": (peft.PromptEncoderConfig, {"encoder_hidden_size": 6}),
    "p-tuning-lstm": (
        peft.PromptEncoderConfig,
        {"encoder_hidden_size": 6, "encoder_reparameterization_type": "LSTM", "encoder_dropout": 0.0},
    ),
    "prefix-tuning": (peft.PrefixTuningConfig, {}),
    "prefix-tuning-projected": (
        peft.PrefixTuningConfig,
        {"prefix_projection": True, "encoder_hidden_size": 6},
    ),
}


@dataclass(frozen=True)
class Case:
    """A folder that PEFT wrote, and what PEFT puts in front of a text when it reads that folder again."""

    folder: Path
    prompt: object


def make_case(name: str, folder: Path) -> Case:
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "n_positions": 16, "n_embd": H * D, "n_layer": L, "n_head": H}
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    )
    tuning, fields = TUNINGS[name]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            base, tuning(task_type="CAUSAL_LM", num_virtual_tokens=P, **fields)
        ).eval()
        for parameter in model.prompt_encoder.parameters():
            parameter.add_(torch.randn_like(parameter))
        model.save_pretrained(folder)
        prompt = peft.PeftModel.from_pretrained(model.get_base_model(), folder).get_prompt(batch_size=1)
    return Case(folder, prompt)


@pytest.mark.parametrize(
    "name", [name for name in TUNINGS if name.startswith("p-") or name == "prompt-tuning"]
)
def test_embeddings_equal_those_of_peft(name, tmp_path):
    case = make_case(name, tmp_path)
    prompt = read_soft_prompt(case.folder, CONFIG)
    assert (prompt.kind, len(prompt), prompt.embeds.dtype) == ("prompt", P, np.float32)
    np.testing.assert_array_equal(prompt.embeds, case.prompt[0].numpy())  # (P, C)


@pytest.mark.parametrize("name", [name for name in TUNINGS if name.startswith("prefix-")])
def test_keys_and_values_equal_those_of_peft(name, tmp_path):
    case = make_case(name, tmp_path)
    prompt = read_soft_prompt(case.folder, CONFIG)
    assert (prompt.kind, len(prompt), prompt.embeds) == ("prefix", P, None)
    assert prompt.keys.shape == prompt.values.shape == (L, H, P, D)
    assert prompt.keys.dtype == prompt.values.dtype == np.float32
    for layer, expected in enumerate(case.prompt.layers):
        np.testing.assert_array_equal(prompt.keys[layer], expected.keys[0].numpy())
        np.testing.assert_array_equal(prompt.values[layer], expected.values[0].numpy())


@pytest.mark.parametrize(("name", "kind"), [("prompt-tuning", "prompt"), ("prefix-tuning", "prefix")])
def test_a_file_alone_is_told_by_its_width(name, kind, tmp_path):
    case = make_case(name, tmp_path)
    alone = read_soft_prompt(case.folder / "adapter_model.safetensors", CONFIG)
    whole = read_soft_prompt(str(case.folder), CONFIG)
    assert alone.kind == whole.kind == kind
    for field in ("embeds", "keys", "values"):
        np.testing.assert_array_equal(getattr(alone, field), getattr(whole, field))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return make_case("prefix-tuning", tmp_path_factory.mktemp("prefix")).folder


# By fields of adapter_config.json, a tensor, or a file that is gone.
REFUSED = rows("""
{"peft_type": "LORA"} | type 'LORA' and must be one of PROMPT_TUNING
{"peft_type": "PROMPT_TUNING"} | peft_type is 'PROMPT_TUNING'
{"num_transformer_submodules": 2} | num_transformer_submodules is 2
{"num_attention_heads": 4} | num_attention_heads is 4 and should be 2
{"num_virtual_tokens": 4} | num_virtual_tokens is 4 and should be 5
{"token_dim": [8]} | token_dim is [8] and should be 8
["prompt_embeddings", [5, 7], "float32"] | of shape (5, 7)
["prompt_embeddings", [48], "float32"] | of shape (48,)
["prompt_embeddings", [16, 48], "float32"] | holds 16 virtual tokens
["prompt_embeddings", [0, 48], "float32"] | holds 0 virtual tokens
["prompt_embeddings", [5, 48], "int64"] | prompt_embeddings is I64
["more", [5, 1], "float32"] | must hold one tensor, prompt_embeddings
adapter_model.safetensors | holds no weights
""")


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(written, tmp_path, change, named):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    if isinstance(change, dict):
        change_config(tmp_path, **change)
    elif isinstance(change, list):
        change_tensors(tmp_path, **{change[0]: np.zeros(*change[1:])})
    else:
        (tmp_path / change).unlink()
    with pytest.raises(CheckpointError) as refusal:
        read_soft_prompt(tmp_path, CONFIG)
    assert named in str(refusal.value)
