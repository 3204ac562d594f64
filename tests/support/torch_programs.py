"""GPT-2s as people write them in torch, each with the modules, names and forward pass of its repository."""

import numpy as np
import torch
from torch import nn

from tinygpt.kernels import reference
from tinygpt.kernels.backend import Batch
from tinygpt.weights.open import open_checkpoint

V, T, C, L, H = 13, 7, 8, 3, 2
IDS = [3, 1, 4, 1, 5]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaled_by: int = C // H) -> torch.Tensor:
    """Causal attention of (..., T, D)."""
    scores = q @ k.mT * scaled_by**-0.5
    mask = torch.ones(scores.shape[-2:]).tril() == 0
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:-1], H, -1).transpose(-2, -3)  # (B, H, T, D)


def together(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-2, -3).flatten(-2)  # (B, T, C)


def positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[-1])


# rasbt/LLMs-from-scratch, previous_chapters.py.


class ScratchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift


class MultiHeadAttention(nn.Module):
    def __init__(self, qkv_bias):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(C, C, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(C, C)
        self.register_buffer("mask", torch.triu(torch.ones(T, T), diagonal=1))

    def forward(self, x):
        matrices = self.W_query, self.W_key, self.W_value
        return self.out_proj(together(attend(*(by_heads(matrix(x)) for matrix in matrices))))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(approximate="tanh"), nn.Linear(4 * C, C))

    def forward(self, x):
        return self.layers(x)


class TransformerBlock(nn.Module):
    def __init__(self, qkv_bias):
        super().__init__()
        self.att, self.ff = MultiHeadAttention(qkv_bias), FeedForward()
        self.norm1, self.norm2 = ScratchNorm(), ScratchNorm()

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Scratch(nn.Module):
    def __init__(self, qkv_bias=False):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(V, C), nn.Embedding(T, C)
        self.trf_blocks = nn.Sequential(*(TransformerBlock(qkv_bias) for _ in range(L)))
        self.final_norm, self.out_head = ScratchNorm(), nn.Linear(C, V, bias=False)

    def forward(self, ids):
        x = self.tok_emb(ids) + self.pos_emb(positions(ids))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


# karpathy/ng-video-lecture, gpt.py.


class Head(nn.Module):
    def __init__(self, scaled_by):
        super().__init__()
        self.scaled_by = scaled_by
        self.key, self.query, self.value = (nn.Linear(C, C // H, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(T, T)))

    def forward(self, x):
        return attend(self.query(x), self.key(x), self.value(x), self.scaled_by)


class Heads(nn.Module):
    def __init__(self, scaled_by):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head(scaled_by) for _ in range(H)), nn.Linear(C, C)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class LectureFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(C, 4 * C), nn.ReLU(), nn.Linear(4 * C, C), nn.Dropout(0.0))

    def forward(self, x):
        return self.net(x)


class LectureBlock(nn.Module):
    def __init__(self, scaled_by):
        super().__init__()
        self.sa, self.ffwd, self.ln1, self.ln2 = (
            Heads(scaled_by),
            LectureFeedForward(),
            nn.LayerNorm(C),
            nn.LayerNorm(C),
        )

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class Lecture(nn.Module):
    """scaled_by: C in the lecture's film, and in most of its heirs."""

    def __init__(self, scaled_by=C // H):
        super().__init__()
        self.token_embedding_table, self.position_embedding_table = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.Sequential(*(LectureBlock(scaled_by) for _ in range(L)))
        self.ln_f, self.lm_head = nn.LayerNorm(C), nn.Linear(C, V)

    def forward(self, ids):
        x = self.token_embedding_table(ids) + self.position_embedding_table(positions(ids))
        return self.lm_head(self.ln_f(self.blocks(x)))


# karpathy's nanoGPT, build-nanogpt, minGPT and makemore: one set of names.


class CausalSelfAttention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C, bias=bias), nn.Linear(C, C, bias=bias)
        self.register_buffer("bias", torch.tril(torch.ones(T, T)).view(1, 1, T, T))

    def forward(self, x):
        return self.c_proj(together(attend(*map(by_heads, self.c_attn(x).split(C, dim=-1)))))


class NanoBlock(nn.Module):
    def __init__(self, bias, norm_bias, gelu):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=norm_bias), nn.LayerNorm(C, bias=norm_bias)
        self.attn = CausalSelfAttention(bias)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(C, 4 * C, bias=bias), "c_proj": nn.Linear(4 * C, C, bias=bias), "act": gelu}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](self.ln_2(x))))


class Nano(nn.Module):
    def __init__(self, approximate="tanh", bias=True, norm_bias=True, is_tied=False):
        super().__init__()
        gelu = nn.GELU(approximate=approximate)
        blocks = nn.ModuleList(NanoBlock(bias, norm_bias, gelu) for _ in range(L))
        tables = {"wte": nn.Embedding(V, C), "wpe": nn.Embedding(T, C)}
        self.transformer = nn.ModuleDict({**tables, "h": blocks, "ln_f": nn.LayerNorm(C, bias=norm_bias)})
        self.lm_head = nn.Linear(C, V, bias=False)
        if is_tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids):
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions(ids))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


# Home-made: torch's own attention, in layers of another name.


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.down(self.up(self.norm2(x)).relu())


class OfTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.layers = nn.ModuleList(TorchBlock() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V)
        self.counts = nn.Parameter(torch.ones(V))  # no part of the model

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(positions(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def made(model: nn.Module) -> nn.Module:
    """Return the model with every parameter away from its first value, zeros and ones included."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def assert_computes(path, model):
    """Compare the logits with the model's own."""
    checkpoint = open_checkpoint(path)
    params = reference.load_params(checkpoint)
    cache = reference.new_kv_cache(checkpoint.config, 1, len(IDS))
    workspace = reference.new_workspace(checkpoint.config, len(IDS), len(IDS))
    found = np.array(reference.forward(params, Batch.of([IDS], [0], [0], "all"), cache, workspace))
    with torch.no_grad():
        expected = model(torch.tensor([IDS]))[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
    return checkpoint
