"""transformers on torch, eager and compiled, and what a job does with them and with a CUDA graph."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, StaticCache

from tinygpt.weights.random_checkpoint import open_random

from .cases import Case, Job
from .check import CHECK_PROMPT, GREEDY_TOKENS, Evidence, check_ids
from .engine import measure
from .torch_graph import Graph, padded, wait


def build_model(name: str, dtype: str, device: str) -> GPT2LMHeadModel:
    """transformers' GPT-2 with the tensors that tinygpt has under this name, in `dtype` on `device`."""
    checkpoint = open_random(name)
    ours = checkpoint.config
    config = GPT2Config(n_layer=ours.n_layer, n_embd=ours.n_embd, n_head=ours.n_head, use_cache=True)
    with torch.device("meta"):  # else torch would first draw weights of its own
        model = GPT2LMHeadModel(config)

    def drawn(parameter: str) -> tuple[str, Tensor]:
        tensor = torch.from_numpy(np.ascontiguousarray(checkpoint.stored[parameter].float32()))
        return f"transformer.{parameter}", tensor.to(device, getattr(torch, dtype))

    with ThreadPoolExecutor() as pool:
        tensors = dict(pool.map(drawn, checkpoint.stored))
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    model.load_state_dict(tensors, assign=True)
    return model.eval()


class Eager:
    """transformers' forward pass with its own cache and an argmax, without the overhead of its `generate`."""

    def __init__(self, model: GPT2LMHeadModel):
        self.model, self.cache, self.tokens = model, None, None

    @torch.inference_mode()
    def start(self, token_ids: list[list[int]], num_steps: int) -> None:
        self.cache = None
        self._advance(torch.tensor(token_ids, device=self.model.device))

    @torch.inference_mode()
    def step(self) -> None:
        self._advance(self.tokens)

    def wait(self) -> None:
        wait(self.model)

    def close(self) -> None:
        self.cache = self.tokens = None

    def _advance(self, tokens: Tensor) -> None:
        out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.tokens, self.cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    @torch.inference_mode()
    def evidence(self) -> Evidence:
        token_ids = check_ids(self.model.config.vocab_size)
        logits = self.model(torch.tensor([token_ids], device=self.model.device)).logits[0].float().cpu().numpy()
        tokens, gaps, cache = torch.tensor([token_ids[:CHECK_PROMPT]], device=self.model.device), [], None
        chosen = []
        for _ in range(GREEDY_TOKENS):
            out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            best = out.logits[0, -1].float().topk(2)
            tokens, cache = best.indices[:1, None], out.past_key_values
            chosen.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
        return Evidence(logits, np.array(chosen), np.array(gaps))


class Compiled:
    """torch.compile(mode="reduce-overhead") with transformers' static cache, as its documentation has it."""

    def __init__(self, model: GPT2LMHeadModel):
        self.model, self.cache, self.tokens, self.size = model, None, None, None
        self.compiled = torch.compile(self._next, mode="reduce-overhead", dynamic=False)

    @torch.no_grad()
    def start(self, token_ids: list[list[int]], num_steps: int) -> None:
        tokens = torch.tensor(token_ids, device=self.model.device)
        self._make_room(tokens, num_steps)
        self.cache.reset()
        # A prompt before decoding is read as it is; the prefill that is measured is compiled.
        self.tokens = self._next(tokens) if num_steps else self._run(tokens)

    @torch.no_grad()
    def step(self) -> None:
        self.tokens = self._run(self.tokens)

    def wait(self) -> None:
        wait(self.model)

    def close(self) -> None:
        self.cache = self.tokens = self.size = None
        torch._dynamo.reset()

    def _run(self, tokens: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled(tokens).clone()  # the next run writes where this one's output lies

    def _next(self, tokens: Tensor) -> Tensor:
        out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    def _make_room(self, tokens: Tensor, num_steps: int) -> None:
        """A cache whose memory is in place before anything is compiled for it."""
        size = tokens.shape[0], padded(tokens.shape[1] + num_steps)
        if size != self.size:
            self.cache, self.size = StaticCache(self.model.config, max_cache_len=size[1]), size
            self._next(tokens[:, :1])


ENGINES = {"eager": Eager, "compiled": Compiled, "graph": Graph}


class Torch:
    """One model for all cases of a job; one engine at a time."""

    def __init__(self, job: Job):
        self.job, self.model = job, build_model(job.name, job.dtype, job.device)

    def measure(self, name: str, case: Case) -> list[float]:
        engine = ENGINES[name](self.model)
        try:
            return measure(engine, case, self.model.config.vocab_size, self.job.steps, self.job.repeats)
        finally:
            engine.close()
            gc.collect()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    def evidence(self) -> Evidence:
        return Eager(self.model).evidence()
