"""What it costs to guide texts: tokens per second with and without, measured in turns.

    pip install ".[guided]"
    python scripts/bench_guided.py --model openai-community/gpt2 --batch-size 32

Each sample writes as many tokens with a grammar as without one, so that the steps are the same but for the masks. Each
repetition runs a kind of text twice between two runs without a grammar, so that what the machine does besides falls on
both; the median of the repetitions is shown.
"""

import argparse
import statistics
import time

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
    num_tokens = args.batch_size * args.max_tokens
    for kind, pairs in runs.items():
        without, guided = (num_tokens / statistics.median(column) for column in zip(*pairs, strict=True))
        loss = statistics.median(1 - plain / seconds for plain, seconds in pairs)
        print(f"{kind:>10}: {guided:8.1f} tokens/s, {without:8.1f} without a grammar: {loss:.1%} less")


def compare(llm: LLM, args: argparse.Namespace, fields: dict) -> tuple[float, float]:
    """Seconds of a run without and with a grammar, the mean of two each."""
    first, *guided, last = (measure(llm, args, given) for given in ({}, fields, fields, {}))
    return (first + last) / 2, sum(guided) / 2


def measure(llm: LLM, args: argparse.Namespace, fields: dict) -> float:
    """Seconds of a run."""
    prompts = [[10 + i, 20, 30, 40] for i in range(args.batch_size)]
    shared = {"max_tokens": args.max_tokens, "ignore_eos": True, "temperature": args.temperature, "top_k": 40}
    params = [SamplingParams(**shared, **fields, seed=i) for i in range(args.batch_size)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {args.max_tokens}:
        raise SystemExit(f"samples have {lengths} tokens, and {args.max_tokens} were wanted: they are no measure.")
    return seconds


if __name__ == "__main__":
    main()
