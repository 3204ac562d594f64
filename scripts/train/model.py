"""GPT-2 in torch, to be trained: the parameters have the names, and on export the layout, of Hugging Face's files."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tinygpt.config import ModelConfig
from tinygpt.weights.architectures.gpt2 import is_transposed

STD = 0.02


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float):
        super().__init__()
        self.n_head, self.dropout = config.n_head, dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.c_attn(x).view(batch, length, 3 * self.n_head, -1).transpose(1, 2).chunk(3, dim=1)
        )  # (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))  # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner_size)
        self.c_proj = nn.Linear(config.inner_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, dropout: float):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, dropout)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Logits of token ids (B, T); with targets (B, T), their mean cross-entropy in nats instead."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.dropout = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(config, dropout) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self._initialise()

    def forward(self, token_ids: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.dropout(self.wte(token_ids) + self.wpe(positions))  # (B, T, C)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    def _initialise(self) -> None:
        """GPT-2's: what is added to the residual stream starts smaller, the deeper the network."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # torch's layer norms start at 1 and 0; biases are set below
            is_residual = name.endswith("c_proj.weight")
            nn.init.normal_(parameter, std=STD / math.sqrt(2 * self.config.n_layer) if is_residual else STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def write_weights(model: GPT, folder: Path) -> None:
    """model.safetensors, float32, as GPT2LMHeadModel saves it. An older one is replaced when the new one is whole."""
    tensors = {
        f"transformer.{name}": (tensor.T if is_transposed(name) else tensor).contiguous().cpu()
        for name, tensor in model.state_dict().items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def write_config(config: ModelConfig, folder: Path) -> None:
    values = asdict(config)
    values["eos_token_id"] = values.pop("eos_token_ids")[0]
    values |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    values |= {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "initializer_range": STD}
    text = json.dumps(dict(sorted(values.items())), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def read_weights(model: GPT, folder: Path) -> None:
    """Load what `write_weights` wrote."""
    from safetensors.torch import load_file

    stored = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    model.load_state_dict({name: t.T if is_transposed(name) else t for name, t in stored.items()})


@torch.inference_mode()
def sample(model: GPT, token_ids: list[int], num_new: int, seed: int, temperature=0.8, top_k=40) -> list[int]:
    """Continue token ids. Every step reads the whole text again: it is short, and this runs three times."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    token_ids = list(token_ids)
    for _ in range(num_new):
        context = torch.tensor([token_ids[-model.config.n_positions :]], device=device)
        best = (model(context)[0, -1].float().cpu() / temperature).topk(min(top_k, model.config.vocab_size))
        choice = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
        token_ids.append(int(best.indices[choice]))
    return token_ids
