"""Adapters of golden models in PEFT's files, written by NumPy alone, for answers recorded of PEFT."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.golden_models import SMALL, golden_array, write_model

NEED_PEFT = "needs peft: pip install -e '.[parity]'"
MATRICES = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}  # (in, out) / C
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "fan_in_fan_out": True, "bias": "none", "lora_alpha": 8}
# Each is one array in the file: what a prompt encoder would compute is computed when it is saved.
SOFT_PROMPTS = {
    "prompt": {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"},
    "p-tuning": {"peft_type": "P_TUNING", "encoder_hidden_size": 6, "encoder_reparameterization_type": "MLP"},
    "prefix": {"peft_type": "PREFIX_TUNING", "prefix_projection": False},
}


def write_lora(folder: Path, rank: int, targets: list[str], has_head: bool, **fields: Any) -> Path:
    """An adapter of write_model(**fields): `targets` of every layer, and the whole head where has_head."""
    sizes = SMALL | fields
    C, tensors = sizes["n_embd"], {}
    for layer in range(sizes["n_layer"]):
        for name, (wide, high) in MATRICES.items():
            if name.split(".")[1] in targets:
                for part, shape in {"lora_A": (rank, wide * C), "lora_B": (high * C, rank)}.items():
                    full = f"transformer.h.{layer}.{name}.{part}.weight"
                    tensors[full] = np.float32(0.3) * golden_array(full, shape)
    if has_head:
        tensors["lm_head.weight"] = golden_array("adapter lm_head", (sizes["vocab_size"], C))
    more = {"modules_to_save": ["lm_head"]} if has_head else {}
    return _write(folder, {**LORA, "r": rank, "target_modules": targets, **more}, tensors)


def write_soft_prompt(folder: Path, kind: str, num_virtual_tokens: int, **fields: Any) -> Path:
    """One of SOFT_PROMPTS for write_model(**fields)."""
    sizes = SMALL | fields
    C, L = sizes["n_embd"], sizes["n_layer"]
    width = 2 * L * C if kind == "prefix" else C
    config = {"num_virtual_tokens": num_virtual_tokens, "token_dim": C, "num_layers": L, "task_type": "CAUSAL_LM"}
    config |= {"num_attention_heads": sizes["n_head"], "num_transformer_submodules": 1, "inference_mode": True}
    tensors = {"prompt_embeddings": golden_array(kind, (num_virtual_tokens, width))}
    return _write(folder, {**SOFT_PROMPTS[kind], **config}, tensors)


def live_peft_model(folder: Path, write: Any, **fields: Any) -> Any:
    """PEFT's model of what write(a folder) has written, on write_model(**fields), all in `folder`."""
    peft = pytest.importorskip("peft", reason=NEED_PEFT)
    from transformers import GPT2LMHeadModel

    base = GPT2LMHeadModel.from_pretrained(write_model(folder / "base", **fields), dtype="float32")
    return peft.PeftModel.from_pretrained(base, write(folder / "adapter")).eval()


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "", **config}))
    if config["peft_type"] == "LORA":
        tensors = {f"base_model.model.{name}": array for name, array in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder
