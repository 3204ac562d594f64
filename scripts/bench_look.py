"""tinygpt's looks next to TransformerLens on the CPU, in one run, with random weights of GPT-2 124M's shape.

    pip install transformer-lens==4.3.0        # and tinygpt, into one environment
    python scripts/bench_look.py

Both take turns. The table has medians in milliseconds; the ratio is TransformerLens's over tinygpt's.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2LMHeadModel

# tinygpt is next to scripts/, installed or not.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from scripts.peers.engines import milliseconds
from scripts.peers.setup import make_checkpoint
from tinygpt import LLM, Edit, SamplingParams
from tinygpt.bench.report import table, threads_text
from tinygpt.hardware import cpu_name

# tokens of a prompt, of a traced prompt, and new ones
PROMPT = 128
POSITIONS = 16
NEW = 32


def loaded(shape: str, folder: str, threads: int) -> tuple[LLM, TransformerBridge]:
    make_checkpoint(f"random:{shape}", Path(folder))
    llm = LLM(folder, threads=threads, max_num_seqs=256, max_capture_bytes=2**30)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    bridge = TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu", tokenizer=None)
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    return llm, bridge


def read_all(llm: LLM, ids: list[int]) -> np.ndarray:
    logits, cache = llm.run_with_cache([ids])
    for name in cache:
        cache[name]  # some are computed here
    return logits


def generate(bridge: TransformerBridge, ids: list[list[int]], name: str, vector: np.ndarray) -> torch.Tensor:
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    with bridge.hooks(fwd_hooks=[(name, lambda x, hook: x + torch.from_numpy(vector))]):
        return bridge.generate(torch.tensor(ids), max_new_tokens=NEW, **options)


def trace(bridge: TransformerBridge, clean: list[int], corrupted: list[int], answer: int) -> np.ndarray:
    """Return the answer's log probability (L, T), a run for each layer and position."""
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(bridge.cfg.n_layers)]
    _, cache = bridge.run_with_cache(torch.tensor([clean]), names_filter=names)
    found = np.empty((len(names), len(clean)), np.float32)
    for i, name in enumerate(names):
        for t in range(len(clean)):

            def restore(x, hook, name=name, t=t):
                x[:, t] = cache[name][:, t]
                return x

            logits = bridge.run_with_hooks(torch.tensor([corrupted]), fwd_hooks=[(name, restore)])
            found[i, t] = logits[0, -1].log_softmax(-1)[answer]
    return found


def compare(llm: LLM, bridge: TransformerBridge, repeats: int) -> None:
    draw = np.random.default_rng(0)
    ids = draw.integers(llm.config.vocab_size, size=(8, PROMPT)).tolist()
    clean = ids[0][:POSITIONS]
    corrupted = ids[1][:POSITIONS]
    answer = ids[2][0]
    steered = f"blocks.{llm.config.n_layer // 2}.hook_resid_post"
    vector = draw.standard_normal(llm.config.n_embd).astype(np.float32)
    params = SamplingParams(
        max_tokens=NEW, temperature=0, ignore_eos=True, edits=[Edit(steered, value=vector)]
    )
    cases: dict[str, tuple[Callable, Callable]] = {
        f"a prompt of {PROMPT}, all arrays": (
            partial(read_all, llm, ids[0]),
            partial(bridge.run_with_cache, torch.tensor(ids[:1])),
        ),
        **{
            f"{NEW} steered tokens, {n} prompts of {POSITIONS}": (
                partial(llm.generate, [row[:POSITIONS] for row in ids[:n]], params, use_tqdm=False),
                partial(generate, bridge, [row[:POSITIONS] for row in ids[:n]], steered, vector),
            )
            for n in (1, 8)
        },
        f"a causal trace of {llm.config.n_layer} layers x {POSITIONS}": (
            partial(llm.causal_trace, clean, corrupted, [answer]),
            partial(trace, bridge, clean, corrupted, answer),
        ),
    }
    lines = []
    for name, (ours, theirs) in cases.items():
        times = {run: [] for run in (ours, theirs)}
        for turn in range(1 + repeats):
            for run in times:
                times[run] += [milliseconds(run)] * (turn > 0)
        medians = [statistics.median(each) for each in times.values()]
        lines.append([name, *(f"{ms:.1f}" for ms in medians), f"{medians[1] / medians[0]:.1f}"])
    difference = np.abs(
        trace(bridge, clean, corrupted, answer) - llm.causal_trace(clean, corrupted, [answer])
    ).max()
    print(table(["case", "tinygpt", "TransformerLens", "ratio"], lines))
    print(f"\nlargest difference of the two traces, in nats: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="124M", help="a shape of random weights (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"random:{args.model}, {cpu_name()}, {threads_text(args.threads)}; ms, medians of {args.repeats}\n"
        )
        compare(*loaded(args.model, folder, args.threads), args.repeats)


if __name__ == "__main__":
    main()
