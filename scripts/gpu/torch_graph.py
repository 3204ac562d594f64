"""A decode step as a CUDA graph captured by hand: the least that torch can take for it without other kernels."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

CACHE_STEP = 64  # positions of a static cache come in multiples of this


def padded(positions: int) -> int:
    return -(-positions // CACHE_STEP) * CACHE_STEP


def wait(model: GPT2LMHeadModel) -> None:
    """Until the device has done all that was asked of it."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


class Graph:
    """GPT-2's forward pass in torch's own operations, with weights of transformers' model, replayed as CUDA graphs.

    Position and tokens stay on the device, so that nothing waits for the host between steps.
    """

    def __init__(self, model: GPT2LMHeadModel, is_captured: bool = True):
        if is_captured and model.device.type != "cuda":
            raise RuntimeError("a CUDA graph needs device cuda")
        self.model, self.is_captured, self.size = model, is_captured, None

    @torch.inference_mode()
    def start(self, token_ids: list[list[int]], num_steps: int) -> None:
        batch, length = len(token_ids), len(token_ids[0])
        if self.size != (batch, length, num_steps):
            self._allocate(batch, length, num_steps)
            self.prefill = self._captured(self._prefill)
            self.decode = self._captured(self._decode) if num_steps else None
        self.prompt.copy_(torch.tensor(token_ids))
        self.prefill()
        self.position.fill_(length)

    def step(self) -> None:
        with torch.inference_mode():
            self.decode()

    def wait(self) -> None:
        wait(self.model)

    def close(self) -> None:
        self.size = self.prefill = self.decode = self.keys = self.values = self.tokens = self.prompt = None

    def _allocate(self, batch: int, length: int, num_steps: int) -> None:
        self.close()
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        room, head_size = padded(length + num_steps), config.n_embd // config.n_head
        shape = config.n_layer, batch, config.n_head, room, head_size
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.prompt = torch.zeros((batch, length), device=device, dtype=torch.long)
        self.tokens = torch.zeros((batch, 1), device=device, dtype=torch.long)
        self.position = torch.zeros(1, device=device, dtype=torch.long)
        self.columns = torch.arange(room, device=device)
        self.size = batch, length, num_steps

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that replays `run`, after it has run twice: libraries set themselves up as they are first used."""
        if not self.is_captured:
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.position.fill_(1)
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _prefill(self) -> None:
        self._forward(self.prompt, None)

    def _decode(self) -> None:
        self._forward(self.tokens, self.position)
        self.position.add_(1)

    def _forward(self, token_ids: Tensor, position: Tensor | None) -> None:
        """The next tokens into self.tokens. position: of the tokens in a decode step; None for prompts."""
        gpt2, length = self.model.transformer, token_ids.shape[1]
        positions = self.columns[:length] if position is None else position
        mask = None if position is None else (self.columns <= position).view(1, 1, 1, -1)
        x = gpt2.wte(token_ids) + gpt2.wpe(positions)  # (B, N, C)
        for layer, block in enumerate(gpt2.h):
            x = x + self._attend(block.attn, block.ln_1(x), layer, positions, mask)
            x = x + block.mlp(block.ln_2(x))
        self.tokens.copy_(self.model.lm_head(gpt2.ln_f(x[:, -1:])).argmax(-1))

    def _attend(self, attention: nn.Module, x: Tensor, layer: int, positions: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        heads = attention.c_attn(x).view(batch, length, 3 * attention.num_heads, -1).transpose(1, 2)  # (B, 3H, N, D)
        q, k, v = heads.chunk(3, dim=1)
        self.keys[layer].index_copy_(2, positions, k)
        self.values[layer].index_copy_(2, positions, v)
        if mask is not None:
            k, v = self.keys[layer], self.values[layer]  # (B, H, T, D)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return attention.c_proj(attended.transpose(1, 2).reshape(batch, length, width))
