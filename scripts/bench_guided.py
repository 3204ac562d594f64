"""What it costs to guide texts: tokens per second with and without, measured in turns.

    pip install ".[guided]"
    python scripts/bench_guided.py --model openai-community/gpt2 --batch-size 32

Each sample writes as many tokens with a grammar as without one, so that the steps are the same but for the masks. Each
repetition runs a kind of text twice between two runs without a grammar, so that what the machine does besides falls on
both; the median of the repetitions is shown. On a machine that others use, the CPU's time says more than the clock's.
"""

import argparse
import statistics
import time
from typing import NamedTuple

from tinygpt import LLM, SamplingParams
from tinygpt.hardware.cpu import cpu_name

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "friends": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
# None of them ends before max_tokens.
KINDS = {
    "any text": {"guided_regex": r"(.|\n)*"},
    "letters": {"guided_regex": "[a-zA-Z ,.]*"},
    "JSON": {"guided_json": {"type": "array", "items": PERSON, "minItems": 10_000}},
}


class Seconds(NamedTuple):
    """Of a run, or of several: by the clock, and of all threads together."""

    clock: float
    cpu: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.clock + other.clock, self.cpu + other.cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="as for `tinygpt generate`; it needs a tokenizer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    with LLM(args.model, dtype=args.dtype, max_num_seqs=args.batch_size) as llm:
        for fields in ({}, *KINDS.values()):  # kernels are compiled, and grammars
            measure(llm, args, fields)
        runs = {kind: [compare(llm, args, fields) for _ in range(args.repetitions)] for kind, fields in KINDS.items()}
    print(f"{args.model}, {llm.dtype}, batch {args.batch_size}, {args.max_tokens} tokens each, on {cpu_name()}")
    num_tokens = 2 * args.batch_size * args.max_tokens
    for kind, pairs in runs.items():
        speed = num_tokens / statistics.median(guided.clock for _, guided in pairs)
        less = statistics.median(1 - plain.clock / guided.clock for plain, guided in pairs)
        more = statistics.median(guided.cpu / plain.cpu - 1 for plain, guided in pairs)
        print(f"{kind:>10}: {speed:8.1f} tokens/s, {less:.1%} less than without; {more:.1%} more time of the CPU")


def compare(llm: LLM, args: argparse.Namespace, fields: dict) -> tuple[Seconds, Seconds]:
    """Two runs without a grammar, and two with one."""
    first, second, third, last = (measure(llm, args, given) for given in ({}, fields, fields, {}))
    return first + last, second + third


def measure(llm: LLM, args: argparse.Namespace, fields: dict) -> Seconds:
    prompts = [[10 + i, 20, 30, 40] for i in range(args.batch_size)]
    shared = {"max_tokens": args.max_tokens, "ignore_eos": True, "temperature": args.temperature, "top_k": 40}
    params = [SamplingParams(**shared, **fields, seed=i) for i in range(args.batch_size)]
    clock, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = Seconds(time.perf_counter() - clock, time.process_time() - cpu)
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {args.max_tokens}:
        raise SystemExit(f"samples have {lengths} tokens, and {args.max_tokens} were wanted: they are no measure.")
    return seconds


if __name__ == "__main__":
    main()
