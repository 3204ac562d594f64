"""GPT-2 to be trained, which is transformers' own, and the files it is kept in."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from tinygpt.weights.config import ModelConfig

SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


class GPT(nn.Module):
    """Logits of token ids (B, T); with targets (B, T), their cross-entropy in nats instead."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0):
        super().__init__()
        self.config = config
        sizes = {name: getattr(config, name) for name in SIZES}
        others = {**dict.fromkeys(DROPOUTS, dropout), "use_cache": False, "bos_token_id": None, "eos_token_id": None}
        self.gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **others))

    def begin_with(self, folder: Path) -> None:
        """Take the weights of a checkpoint of these sizes."""
        theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
        self.gpt2.load_state_dict(theirs.state_dict())

    def forward(self, token_ids: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        logits = self.gpt2(token_ids).logits  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def write_weights(model: GPT, folder: Path) -> None:
    """model.safetensors, float32, as GPT2LMHeadModel saves it. An older one is replaced when the new one is whole."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.gpt2.state_dict().items()}
    del tensors["lm_head.weight"]  # the token embedding
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def write_config(config: ModelConfig, folder: Path) -> None:
    values = asdict(config)
    values["eos_token_id"] = values.pop("eos_token_ids")[0]
    values |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    values |= {**dict.fromkeys(DROPOUTS, 0), "initializer_range": 0.02}
    text = json.dumps(dict(sorted(values.items())), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
