"""tinygpt beside transformers, float32, in one run: decode at batch 1 and 8, and prefill of 512 tokens.

    python scripts/bench_transformers.py                      # random weights of GPT-2 124M's shape
    python scripts/bench_transformers.py --model FOLDER       # a checkpoint of your own

The two sides take turns, so that a slow moment of the machine hits both; medians over the repeats are printed, with
the ratio. Ours is timed through LLM.generate (scheduling, sampling and all); transformers' through its forward pass
with a KV cache and an argmax, without the overhead of its `generate`. Needs torch and transformers.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tinygpt import LLM, SamplingParams
from tinygpt.hardware.threads import thread_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder; default: random weights of the 124M shape")
    parser.add_argument("--threads", type=int, help="for both sides; default: the physical cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the times of every repeat here")
    arguments = parser.parse_args()
    threads = thread_count(arguments.threads)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or random_checkpoint(Path(scratch))
        theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
        with LLM(folder, threads=threads, prefix_cache_seqs=0) as ours:  # the same prompts again and again
            rows = [measure(ours, theirs, *case, repeats=arguments.repeats) for case in CASES]
    print_table(rows, threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


# name, batch, prompt tokens, new tokens
CASES = [("decode, batch 1", 1, 50, 100), ("decode, batch 8", 8, 32, 64), ("prefill 512", 1, 512, 1)]


def measure(ours: LLM, theirs: GPT2LMHeadModel, name: str, batch: int, prompt: int, new: int, repeats: int) -> dict:
    """Milliseconds a decode step, or for the prefill, of each side in turn."""
    ids = np.random.default_rng(0).integers(0, ours.config.vocab_size, (batch, prompt)).tolist()
    sides = {"tinygpt": lambda: step_ms_ours(ours, ids, new), "transformers": lambda: step_ms_theirs(theirs, ids, new)}
    for run in sides.values():
        run()  # warm-up: compilation, first touch of memory
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, run in sides.items():
            time.sleep(0.1)  # the other side's threads stop spinning
            times[side].append(run())
    return {"case": name, "batch": batch, "prompt": prompt, "new": new, "ms": times}


def step_ms_ours(llm: LLM, ids: list[list[int]], new: int) -> float:
    def run(max_tokens: int) -> None:
        llm.generate(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    return per_step(run, new)


def step_ms_theirs(model: GPT2LMHeadModel, ids: list[list[int]], new: int) -> float:
    @torch.inference_mode()
    def run(max_tokens: int) -> None:
        tokens, cache = torch.tensor(ids), None
        for _ in range(max_tokens):
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    return per_step(run, new)


def per_step(run: Callable[[int], None], new: int) -> float:
    """The whole time of one new token, or, of more, what each further one adds."""
    first = seconds(run, 1)
    return 1e3 * (first if new == 1 else (seconds(run, new) - first) / (new - 1))


def seconds(run: Callable[[int], None], new: int) -> float:
    start = time.perf_counter()
    run(new)
    return time.perf_counter() - start


def random_checkpoint(folder: Path) -> str:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    return str(folder)


def print_table(rows: list[dict], threads: int) -> None:
    print(f"float32, {threads} threads, median of {len(rows[0]['ms']['tinygpt'])} (fastest in brackets), ms\n")
    print("| | tinygpt | transformers | ratio |\n|---|---|---|---|")
    for row in rows:
        ours, theirs = (row["ms"][side] for side in ("tinygpt", "transformers"))
        cells = [f"{statistics.median(times):.1f} ({min(times):.1f})" for times in (ours, theirs)]
        ratio = statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
        print(f"| {row['case']} | {' | '.join(cells)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
