"""What it costs to guide texts: tokens per second with and without, measured in turns.

    pip install ".[guided]"
    python scripts/bench_guided.py --model openai-community/gpt2 --batch-size 32

Each sample writes as many tokens with a grammar as without one, so that the steps are the same but for the masks. The
kinds of texts are run one after another, `--repetitions` times, and each is compared with the run without a grammar
that is next to it: what else the machine is doing then falls on both.
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
    "nothing": {},
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
        for fields in KINDS.values():  # kernels are compiled, and grammars
            measure(llm, args, fields)
        runs = [{kind: measure(llm, args, fields) for kind, fields in KINDS.items()} for _ in range(args.repetitions)]
    print(f"{args.model}, {llm.dtype}, batch {args.batch_size}, {args.max_tokens} tokens each, on {cpu_name()}")
    for kind in KINDS:
        speed = statistics.median(run[kind] for run in runs)
        loss = statistics.median(1 - run[kind] / run["nothing"] for run in runs)
        print(f"{kind:>10}: {speed:8.1f} tokens/s, {loss:6.1%} less than without")


def measure(llm: LLM, args: argparse.Namespace, fields: dict) -> float:
    """Tokens per second."""
    prompts = [[10 + i, 20, 30, 40] for i in range(args.batch_size)]
    shared = {"max_tokens": args.max_tokens, "ignore_eos": True, "temperature": args.temperature, "top_k": 40}
    params = [SamplingParams(**shared, **fields, seed=i) for i in range(args.batch_size)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {args.max_tokens}:
        raise SystemExit(
            f"the samples have {lengths} tokens, where {args.max_tokens} were wanted: they are no measure."
        )
    return args.batch_size * args.max_tokens / seconds


if __name__ == "__main__":
    main()
