"""tinygpt next to torch on one GPU, on random checkpoints: decoding, a prefill, and the agreement of the results.

    python scripts/bench_torch_gpu.py --models 124M 355M      # batch 1, 8 and 32 (needs torch and transformers)
    python scripts/bench_torch_gpu.py --models tiny --device cpu --engines tinygpt eager    # a rehearsal

Engines: tinygpt; transformers eager; transformers compiled with mode="reduce-overhead", which replays CUDA graphs.
Decoding is timed at a mean context of 160 (batch 1) or 512 positions, a prefill is of 1023 tokens. The table has
medians in milliseconds.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, StaticCache

# tinygpt is next to scripts/, installed or not.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from scripts.peers.setup import make_checkpoint
from tinygpt import LLM, SamplingParams
from tinygpt.bench.report import table
from tinygpt.weights.checkpoint import SHAPES

PREFILL = 1023
CHECK_PROMPT = 32


def build_model(shape: str, dtype: str, device: str) -> GPT2LMHeadModel:
    """Return transformers' GPT-2 with the tensors of random:SHAPE."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(f"random:{shape}", Path(folder))
        return GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()


class Eager:
    """The forward pass with a growing cache and an argmax, without `generate`."""

    def __init__(self, model: GPT2LMHeadModel):
        self.model = model

    def start(self, token_ids: list[list[int]], num_steps: int) -> None:
        self.tokens, self.cache = torch.tensor(token_ids, device=self.model.device), None
        self.step()

    def step(self) -> None:
        out = self.model(self.tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.tokens, self.cache = out.logits[:, -1:].argmax(-1), out.past_key_values


class Compiled:
    """torch.compile(mode="reduce-overhead") with transformers' static cache, as in its documentation."""

    def __init__(self, model: GPT2LMHeadModel):
        self.model, self.size = model, None
        self.compiled = torch.compile(self._next, mode="reduce-overhead", dynamic=False)

    def start(self, token_ids: list[list[int]], num_steps: int) -> None:
        tokens = torch.tensor(token_ids, device=self.model.device)
        size = tokens.shape[0], tokens.shape[1] + num_steps
        if size != self.size:
            self.cache, self.size = StaticCache(self.model.config, max_cache_len=size[1]), size
            self._next(tokens[:, :1])  # allocates the cache before anything is compiled for it
        self.cache.reset()
        # A prompt before decoding is read eagerly; a timed prefill is compiled.
        self.tokens = self._next(tokens) if num_steps else self._run(tokens)

    def step(self) -> None:
        self.tokens = self._run(self.tokens)

    def _run(self, tokens: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled(tokens).clone()  # the next run overwrites this output

    def _next(self, tokens: Tensor) -> Tensor:
        out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)


TORCH_ENGINES = {"eager": Eager, "compiled": Compiled}


def torch_ms(engine: Any, prompts: list[list[int]], steps: int, repeats: int) -> list[float]:
    """Return milliseconds of a step, or of the prefill if steps is 0, after a warm-up."""
    wait, found = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None), []
    for _ in range(1 + repeats):
        if steps:
            engine.start(prompts, steps)
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        if not steps:
            engine.start(prompts, 0)
        wait()
        found.append(1e3 * (time.perf_counter() - start) / max(steps, 1))
    return found[1:]


def tinygpt_ms(llm: LLM, prompts: list[list[int]], steps: int, repeats: int) -> list[float]:
    params, found = SamplingParams(max_tokens=1 + steps, temperature=0.0, ignore_eos=True), []
    for _ in range(2 + repeats):
        start = time.perf_counter()
        metrics = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
        first, last = max(m.first_token for m in metrics), max(m.finished for m in metrics)
        found.append(1e3 * ((last - first) / steps if steps else first - start))
    return found[2:]


def agreement(llm: LLM, model: GPT2LMHeadModel, steps: int = 200) -> str:
    """Compare logits and greedy tokens with transformers'."""
    ids = np.random.default_rng(99).integers(0, llm.config.vocab_size, 256).tolist()
    theirs = model(torch.tensor([ids], device=model.device)).logits[0].float().cpu().numpy()  # (256, V)
    difference = np.abs(llm.logits(ids) - theirs).max()
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    tokens = llm.generate([ids[:CHECK_PROMPT]], params, use_tqdm=False)[0].outputs[0].token_ids
    prompt = torch.tensor([ids[:CHECK_PROMPT]], device=model.device)
    expected = model.generate(prompt, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0)
    same = np.flatnonzero(np.array(tokens) != expected[0, CHECK_PROMPT:].cpu().numpy())
    num_equal = same[0] if same.size else steps
    return f"logits differ by at most {difference:.2g}; {num_equal} of {steps} greedy tokens are equal"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["124M"])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    engines = ["tinygpt", *TORCH_ENGINES]
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=128, help="timed together (default: 128)")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rows = []
    for shape in args.models:
        model = build_model(shape, args.dtype, args.device)
        sizes = {"max_num_seqs": max(args.batches), "prefix_cache_seqs": 0, "device": args.device}
        llm = LLM(f"random:{shape}", args.dtype, **sizes)
        if "tinygpt" in args.engines:
            print(f"{shape} {args.dtype}, tinygpt next to transformers: {agreement(llm, model)}", flush=True)
        lengths = {n: (160 if n == 1 else 512) - args.steps // 2 for n in args.batches}
        cases = [(f"decode, batch {n}", n, length, args.steps) for n, length in lengths.items()]
        for case, batch, length, steps in [*cases, (f"prefill of {PREFILL}", 1, PREFILL, 0)]:
            prompts = np.random.default_rng(0).integers(0, llm.config.vocab_size, (batch, length)).tolist()
            cells = []
            for name in args.engines:
                engine, timed = (llm, tinygpt_ms) if name == "tinygpt" else (TORCH_ENGINES[name](model), torch_ms)
                try:
                    cells.append(f"{statistics.median(timed(engine, prompts, steps, args.repeats)):.3f}")
                except Exception as error:  # the other engines go on
                    cells.append(type(error).__name__)
                    print(f"{shape}, {case}, {name}: {error}", file=sys.stderr, flush=True)
                del engine
                gc.collect()
            rows.append([shape, case, *cells])
            print(*rows[-1], sep=" | ", flush=True)
        llm.close()
    print(f"\n{table(['model', 'case', *args.engines], rows, args.engines)}")


if __name__ == "__main__":
    main()
