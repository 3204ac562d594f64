"""LoRA adapters of other families than GPT-2: what PEFT makes of the same files, and matrices merged by hand."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.family_models import T, V, write_family
from support.golden_models import NEED_PEFT, golden_array, golden_ids
from support.oracles import TOLERANCE
from support.recorded import MISSING
from tinygpt import LLM
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.open import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
R, ALPHA = 3, 5
SCALE = np.float32(ALPHA / R)


def write_lora(folder, tensors, targets, **fields):
    """By the names of modules in transformers' models."""
    config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "bias": "none", "target_modules": targets, **fields}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}": a for name, a in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def factors(module, out, inner):
    a, b = (golden_array(f"{module} {part}", shape) for part, shape in (("a", (R, inner)), ("b", (out, R))))
    return np.float32(0.3) * a, np.float32(0.3) * b


# A module of a layer that is adapted: one of the three that are one matrix here, one whose rows lie in another order,
# and so on.
BY_HAND = [
    ("opt", "model.decoder.layers.1.self_attn.k_proj"),
    ("opt-350m", "model.decoder.project_in"),
    ("bloom-6", "transformer.h.0.self_attention.query_key_value"),
    ("mpt-6", "transformer.blocks.1.attn.Wqkv"),
    ("gpt-1", "transformer.h.1.mlp.c_fc"),
]


@pytest.mark.parametrize(("name", "module"), BY_HAND)
def test_a_matrix_that_is_merged_by_hand(name, module, tmp_path):
    """Into the tensor that transformers has, before it becomes a parameter."""
    base, merged = (write_family(tmp_path / folder, name) for folder in ("base", "merged"))
    tensors = load_file(merged / "model.safetensors")
    weight, is_in_out = tensors[f"{module}.weight"], name == "gpt-1"
    a, b = factors(module, *(weight.shape[::-1] if is_in_out else weight.shape))
    update = SCALE * (b @ a)
    tensors[f"{module}.weight"] = weight + (update.T if is_in_out else update)
    save_file({key: np.ascontiguousarray(array) for key, array in tensors.items()}, merged / "model.safetensors")
    files = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    adapter = write_lora(tmp_path / "adapter", files, [module])
    assert_same(merge_lora(open_checkpoint(base), adapter), open_checkpoint(merged), open_checkpoint(base))


def assert_same(found, expected, other):
    changed = []
    for name in expected.stored:
        np.testing.assert_allclose(found.tensor(name), expected.tensor(name), rtol=0, atol=1e-5, err_msg=name)
        if np.abs(found.tensor(name) - other.tensor(name)).max() > 0.1:
            changed.append(name)
    assert len(changed) == 1


def test_a_file_that_does_not_fit_is_refused_by_the_names_of_its_model(tmp_path):
    base, module = write_family(tmp_path / "base", "opt"), "model.decoder.layers.0.self_attn.v_proj"
    a, b = factors(module, 24, 24)
    files = {f"{module}.lora_A.weight": a[:, 1:], "transformer.h.0.attn.c_attn.lora_B.weight": b}
    with pytest.raises(CheckpointError) as error:
        merge_lora(open_checkpoint(base), write_lora(tmp_path / "adapter", files, [module]))
    assert f"missing: {module}.lora_B.weight" in str(error.value)
    assert f"{module}.lora_A.weight is (3, 23) and should be (3, 24)" in str(error.value)
    assert "unexpected: transformer.h.0.attn.c_attn.lora_B.weight" in str(error.value)


def test_positions_of_opt_are_not_computed_as_they_are_merged(tmp_path):
    base, module = write_family(tmp_path / "base", "opt"), "model.decoder.embed_positions"
    a, b = factors(module, 24, T + 2)
    files = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    with pytest.raises(CheckpointError, match=f"adapts {module}, whose rows PEFT looks up by the attention mask"):
        merge_lora(open_checkpoint(base), write_lora(tmp_path / "adapter", files, ["embed_positions"]))


# What PEFT itself writes and computes.

VARIANTS = [
    ("opt", {"target_modules": ["q_proj", "v_proj"]}),
    ("opt", {"target_modules": "all-linear", "bias": "all"}),
    ("opt", {"target_modules": ["k_proj", "fc2"], "bias": "lora_only", "layers_to_transform": [1]}),
    ("opt", {"target_modules": ["embed_tokens", "out_proj"]}),
    ("opt", {"target_modules": ["fc1"], "modules_to_save": ["embed_tokens", "embed_positions", "final_layer_norm"]}),
    ("opt", {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["v_proj"]}),
    ("opt-350m", {"target_modules": ["project_in", "project_out", "fc1"], "use_rslora": True}),
    ("opt-350m", {"target_modules": ["embed_tokens"]}),
    ("opt-odd", {"target_modules": ["embed_tokens", "lm_head", "fc1"]}),
    ("opt-plain-norms", {"target_modules": ["q_proj", "k_proj"], "bias": "all"}),
    ("galactica", {"target_modules": ["q_proj", "fc1"], "bias": "all"}),
    ("bloom-6", {"target_modules": ["query_key_value"]}),
    ("bloom-6", {"target_modules": "all-linear", "bias": "all", "rank_pattern": {"dense": 2}}),
    ("bloom-14", {"target_modules": ["word_embeddings", "dense"], "modules_to_save": ["word_embeddings_layernorm"]}),
    ("bloom-untied", {"target_modules": ["lm_head"], "modules_to_save": ["query_key_value"]}),
    ("mpt-6", {"target_modules": ["Wqkv", "down_proj"]}),
    ("mpt-6", {"target_modules": r".*blocks\.1\..*_proj", "modules_to_save": ["norm_f"]}),
    ("gpt-1", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True, "bias": "all"}),
    ("gpt-1", {"target_modules": ["tokens_embed", "positions_embed"]}),
    ("xglm", {"target_modules": "all-linear", "bias": "all"}),
    ("xglm", {"target_modules": ["embed_tokens", "fc2"]}),
    ("biogpt", {"target_modules": ["embed_tokens", "k_proj"]}),
    ("biogpt-odd", {"target_modules": ["output_projection", "fc1"], "modules_to_save": ["layer_norm"]}),
]


def new_adapter(folder, base, fields):
    peft = pytest.importorskip("peft", reason=NEED_PEFT)
    torch = pytest.importorskip("torch", reason=MISSING)
    from support.oracles import read_model

    model = peft.get_peft_model(read_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **{"r": R, **fields}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def peft_logits(base, adapter, ids):
    import peft
    import torch

    from support.oracles import read_model

    with torch.no_grad():
        return peft.PeftModel.from_pretrained(read_model(base), adapter).eval()(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize(("name", "fields"), VARIANTS, ids=str)
def test_logits_are_those_of_peft(name, fields, tmp_path):
    base = write_family(tmp_path / "base", name)
    adapter, ids = new_adapter(tmp_path / "adapter", base, fields), golden_ids(T, name, V)
    expected = peft_logits(base, adapter, ids)
    with LLM(str(base), device="reference", lora=adapter) as llm, LLM(str(base), device="reference") as plain:
        np.testing.assert_allclose(llm.logits(ids), expected, rtol=0, atol=TOLERANCE)
        assert np.abs(plain.logits(ids) - expected).max() > 0.1
