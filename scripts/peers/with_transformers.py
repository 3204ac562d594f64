"""transformers on torch: its forward pass with a KV cache and an argmax, without the overhead of its `generate`."""

from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

from .engine import SteppingEngine


class Engine(SteppingEngine):
    def __init__(self, folder: Path, dtype: str, threads: int):
        torch.set_num_threads(threads)
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def start(self, ids: list[list[int]]) -> None:
        self.tokens, self.cache = torch.tensor(ids), None
        self.step()

    @torch.inference_mode()
    def step(self) -> None:
        out = self.model(self.tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.tokens, self.cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    @torch.inference_mode()
    def last_logits(self, ids: list[int]) -> list[float]:
        return self.model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float().tolist()
