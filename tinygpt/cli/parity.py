"""`tinygpt parity`: compare this engine with transformers, or with a file of transformers' results."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli import loading
from tinygpt.cli.flags import WEIGHTS, Command, add_checkpoint, add_flag, checkpoint_of
from tinygpt.cli.input import PromptRecord, read_lines, read_prompts
from tinygpt.cli.output import check_writable, log, print_fields, print_json, print_table
from tinygpt.errors import RequestError, TinyGPTError, invalid
from tinygpt.hardware import thread_count
from tinygpt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinygpt.evaluation.parity import Difference, Golden, Parity
    from tinygpt.llm import LLM

# Two to four times the differences on the demo, which reach 0.07, 0.5 and 2.1 in the last three dtypes. The standard
# deviation of a trained model's logits is a few units.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.25, "int8": 1.0, "int4": 4.0}
PROMPT_LENGTHS = (1, 2, 7, 33, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add_flag(parser, "dtype", default="float32", help=f"{WEIGHTS} (default: float32)")
    add_flag(parser, "device")
    add_flag(parser, "threads")
    defaults = ", ".join(f"{tolerance:g} for {dtype}" for dtype, tolerance in TOLERANCES.items())
    about = f"what a logit may differ by (default: {defaults})"
    parser.add_argument("--tolerance", type=float, metavar="X", help=about)
    lengths = ", ".join(map(str, PROMPT_LENGTHS))
    default = f"{len(PROMPT_LENGTHS)} built-in ones of {lengths} token ids"
    about = f"prompts, as JSONL of objects with a field prompt: a text or token ids (default: {default})"
    parser.add_argument("--input", metavar="FILE", help=about)
    about = "greedy tokens after each (default: %(default)s)"
    parser.add_argument("-n", "--max-tokens", type=int, default=32, metavar="N", help=about)
    about = "also show how far each layer's hidden states differ; --tolerance is for logits (default: off)"
    parser.add_argument("--layers", action="store_true", help=about)
    about = "compare with this file, prompts included (default: with transformers)"
    parser.add_argument("--golden", metavar="FILE", help=about)
    about = "write what transformers computes to this .npz file (default: none)"
    parser.add_argument("--save-golden", metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(args: argparse.Namespace) -> None:
    """Print the comparison. Raise TinyGPTError if a difference exceeds the tolerance."""
    args.model = checkpoint_of(args)
    _check_flags(args)
    loading.set_thread_pools(args.threads)
    folder = _folder_for_transformers(args.model) if args.golden is None else None
    from tinygpt.evaluation.parity import compare
    from tinygpt.llm import LLM

    with LLM(args.model, args.dtype, args.device, args.threads) as llm:
        if args.layers and llm.config.embed_dim is not None:
            raise RequestError(f"--layers needs hidden states of one width, and {args.model} has two: omit it.")
        tolerance = TOLERANCES[llm.dtype] if args.tolerance is None else args.tolerance
        goldens = _computed(args, llm, folder) if folder else _loaded(args, llm)
        log("computing with tinygpt")
        logits = [llm.logits(golden.token_ids) for golden in goldens]
        states = [llm.hidden_states(golden.token_ids) for golden in goldens] if args.layers else None
        parity = compare(goldens, logits, _greedy(llm, goldens), states)
    failures = parity.failures(tolerance)
    about = {"model": args.model, "dtype": llm.dtype, "device": args.device, "tolerance": tolerance}
    about |= {"compared_with": args.golden or "transformers", "passed": not failures}
    if args.json:
        print_json({**about, "failures": failures, **asdict(parity)})
    else:
        _print_text(about, parity)
    if failures:
        raise TinyGPTError("\n".join(["no parity:", *(f"  {failure}" for failure in failures)]))


def _check_flags(args: argparse.Namespace) -> None:
    if args.golden is not None and (args.input is not None or args.save_golden is not None):
        raise RequestError("--golden has its own prompts and results: give it without --input and --save-golden.")
    if args.max_tokens < 0:
        raise invalid("--max-tokens", args.max_tokens, "at least 0")
    if args.tolerance is not None and not 0 <= args.tolerance < float("inf"):
        raise invalid("--tolerance", args.tolerance, "a number from 0 up")
    if args.golden is not None and not Path(args.golden).is_file():
        raise RequestError(f"there is no file --golden {args.golden}.")
    if args.save_golden is not None:
        check_writable("--save-golden", Path(args.save_golden))


def _folder_for_transformers(model: str) -> Path:
    """Return the folder of a checkpoint. Raise RequestError if transformers cannot read it."""
    from tinygpt.weights.containers.formats import INDEX
    from tinygpt.weights.containers.mapped_file import FILES
    from tinygpt.weights.open import open_checkpoint, resolve
    from tinygpt.weights.stored.packed import PackedCheckpoint

    path, checkpoint = resolve(model), open_checkpoint(model)
    if isinstance(checkpoint, PackedCheckpoint) or checkpoint.is_float8:
        raise RequestError(
            f"transformers cannot read {model}, which tinygpt has converted: compare its original, or give --golden "
            "FILE --dtype auto with a file that --save-golden has written of the original."
        )
    folder = path.parent if path.name in FILES else path
    has_weights = any((folder / (name + ending)).is_file() for name in FILES for ending in ("", INDEX))
    if not (has_weights and (folder / "config.json").is_file()):
        raise RequestError(
            f"transformers cannot read {model}, which is not in its format: give --golden, or first run `tinygpt "
            "convert --to safetensors`."
        )
    return folder


def _loaded(args: argparse.Namespace, llm: "LLM") -> "list[Golden]":
    """Read --golden. Raise RequestError if it is of another model."""
    from tinygpt.evaluation.parity import load_goldens

    goldens = load_goldens(Path(args.golden))
    V, C, L = llm.config.vocab_size, llm.config.n_embd, llm.config.n_layer
    if not goldens:
        raise RequestError(f"{args.golden} holds no prompt.")
    for golden in goldens:
        T = len(golden.token_ids)
        if golden.logits.shape != (T, V) or T + len(golden.greedy_ids) > llm.max_model_len:
            raise RequestError(f"{args.golden} is of another model: logits {golden.logits.shape}, here ({T}, {V}).")
        if args.layers and (golden.hidden_states is None or golden.hidden_states.shape != (L + 1, T, C)):
            raise RequestError(f"{args.golden} has no hidden states of this model: make it with --layers too.")
    return goldens


def _computed(args: argparse.Namespace, llm: "LLM", folder: Path) -> "list[Golden]":
    from tinygpt.evaluation.parity import check_transformers, compute_goldens, save_goldens

    prompts = _built_in_prompts(llm) if args.input is None else _read_prompts(Path(args.input), llm)
    room = llm.max_model_len
    num_greedy = [min(args.max_tokens, room - len(prompt)) for prompt in prompts]
    check_transformers()
    log("computing with transformers")
    goldens = compute_goldens(folder, prompts, num_greedy, thread_count(args.threads), args.layers)
    if args.save_golden is not None:
        save_goldens(Path(args.save_golden), goldens)
        log(f"{args.save_golden} holds what transformers computes")
    return goldens


def _built_in_prompts(llm: "LLM") -> list[list[int]]:
    """Return ids all over the vocabulary, the same in every run."""
    lengths = sorted({min(length, llm.max_model_len) for length in PROMPT_LENGTHS})
    return [[(7919 * (i + 1) * (i + length)) % llm.config.vocab_size for i in range(length)] for length in lengths]


def _read_prompts(path: Path, llm: "LLM") -> list[list[int]]:
    """Return their token ids. Raise RequestError that lists every invalid line."""

    def ids_of(record: PromptRecord) -> list[int]:
        prompt, split = record.prompt, record.split_special_tokens
        return llm._read_ids("logits", prompt if split is None else llm.read_prompt(prompt, split).token_ids)

    records = read_prompts(path, SamplingParams())
    if not records:
        raise RequestError(f"{path} holds no prompt.")
    return read_lines(path, {record.line: partial(ids_of, record) for record in records})


def _greedy(llm: "LLM", goldens: "list[Golden]") -> list[list[int]]:
    asked = [golden for golden in goldens if golden.greedy_ids]
    params = [SamplingParams(max_tokens=len(at.greedy_ids), temperature=0.0, ignore_eos=True) for at in asked]
    outputs = iter(llm.generate([at.token_ids for at in asked], params, use_tqdm=False) if asked else ())
    return [next(outputs).outputs[0].token_ids if golden.greedy_ids else [] for golden in goldens]


def _print_text(about: dict[str, Any], parity: "Parity") -> None:
    print_fields("parity", about)
    logits = {
        "positions": f"{parity.num_positions} in {parity.num_prompts} prompts",
        "largest_difference": f"{parity.logits.largest:.3g}",
        "mean_difference": f"{parity.logits.mean:.3g}",
        "top-1 agreement": f"{parity.top_1:.2%}",
        "top-20 agreement": f"{parity.top_20:.2%}",
    }
    print_fields("logits", logits)
    _print_differences("by position", [f"from {start}" for start in parity.by_position], parity.by_position.values())
    if parity.by_layer is not None:
        names = ["embeddings", *(f"after layer {i}" for i in range(len(parity.by_layer) - 2)), "after ln_f"]
        _print_differences("by layer (for information, no tolerance)", names, parity.by_layer)
    print_fields("greedy", {"tokens": parity.num_greedy_tokens, "divergent_runs": len(parity.divergences)})
    if parity.divergences:
        rows = [(at.prompt, at.index, at.token_id, at.expected, f"{at.lead:.3g}") for at in parity.divergences]
        print_table("first divergent tokens", [("prompt", "token", "id", "expected", "which led by"), *rows])


def _print_differences(title: str, names: Iterable[str], found: "Iterable[Difference]") -> None:
    cells = [(name, f"{at.largest:.3g}", f"{at.mean:.3g}") for name, at in zip(names, found, strict=True)]
    print_table(title, [("", "largest", "mean"), *cells])


PARITY = Command(
    "compare logits and greedy tokens with transformers, or with a stored golden file",
    add_arguments,
    run,
    "[flags] [CHECKPOINT]",
)
