"""`tinygpt generate`: text on stdout for one prompt, or records for a file of prompts."""

import argparse
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..sampling_params import SamplingParams
from .flags import (
    Command,
    add_color,
    add_group,
    add_sampling_groups,
    compiling,
    flag_of,
    load_llm,
    params_of,
    set_thread_pools,
    shows_surprise,
    steering,
    warm_up,
    with_seed,
)
from .streams import STDIN, counted, emit, log, rates, read_text

if TYPE_CHECKING:
    from .batch import Run

EVERY_DAY = (
    *("prompt", "prompt_text", "file", "input", "output", "json", "echo", "color"),
    *("max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop", "repetition_penalty", "overflow"),
    *("model", "dtype", "threads", "device"),
)
# Where a prompt may come from: the name of the argument -> how errors call it.
SOURCES = {"prompt": "a PROMPT", "prompt_text": "--prompt", "file": "--file", "input": "--input"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="words, joined by spaces; - is stdin (default: all of stdin, as it is)",
    )
    add = parser.add_argument_group(
        "prompt", "Flags of one letter mean what they do in llama.cpp."
    ).add_argument
    add(
        "-p",
        "--prompt",
        dest="prompt_text",
        metavar="TEXT",
        help="the prompt, as one argument (default: none)",
    )
    add(
        "-f",
        "--file",
        metavar="FILE",
        help="a text file that is the prompt, as it is; - is stdin (default: none)",
    )
    add_sampling_groups(parser)
    add = parser.add_argument_group("input and output").add_argument
    add(
        "--input",
        metavar="FILE",
        help="JSONL, one object a line: prompt (a text or token ids) and optionally id (default: the line's number), "
        "split_special_tokens and any sampling field, or token ids and commas alone; - is stdin (default: none)",
    )
    add(
        "--input-format",
        choices=("jsonl", "text"),
        default="jsonl",
        help="of --input: jsonl, or text, a prompt in each line (default: jsonl)",
    )
    add(
        "--output",
        metavar="FILE",
        help="JSONL, one record for each line of --input as soon as it is finished; the same command continues an "
        "interrupted run and skips ids with a record; --model and --dtype must be the same, other flags are not "
        "compared (default: stdout, as -)",
    )
    text = (
        "answer the prompts of --input by N actors (default: 1) of the Ray cluster at $RAY_ADDRESS, or else of "
        "one that is started here; each host of it needs --model at the same path (default: this process)"
    )
    add("--ray", nargs="?", type=int, const=1, metavar="N", help=text)
    switches = {
        "--keep-order": "write records in the order of --input (default: as they finish)",
        "--json": "print a JSON record (default: the text)",
        "--no-stream": "print the text once it is complete (default: as it is made)",
        "--echo": "print the prompt in front of the text (default: off)",
    }
    for flag, text in switches.items():
        add(flag, action="store_true", help=text)
    add_color(add)
    add = add_group(parser).add_argument
    add(
        "--steer",
        type=steering,
        action="append",
        metavar="FILE[:STRENGTH[:FIRST-LAST]]",
        help="a control vector in GGUF, as llama.cpp's, that is added to the residual stream STRENGTH times (default: "
        "1, and all of its layers); may be given several times",
    )


def run(args: argparse.Namespace) -> None:
    if args.output == STDIN:
        args.output = None
    _check_combination(args)
    params = params_of(args, edits=_edits(args))
    if args.input is not None:
        from .batch import run_batch

        run_batch(args, params, partial(_kind_of, args))
    else:
        prompt = _given_prompt(args)
        _run_prompt(args, read_text("stdin") if prompt is None else prompt, with_seed(params))


def _kind_of(args: argparse.Namespace, content: bytes) -> "type[Run]":
    """Return how the lines of --input are read and answered."""
    from .batch import Run, TextRun

    if args.input_format == "text":
        return TextRun
    if b'"custom_id"' in content or b'"url"' in content:
        from .openai_batch import OpenAIRun, are_openais

        if are_openais(content):
            return OpenAIRun
    return Run


def _edits(args: argparse.Namespace) -> list[Any]:
    if args.steer is None:
        return []
    set_thread_pools(args.threads)  # before NumPy is imported
    from ..look.edits import ControlVector

    steering_edits = []
    for path, *how in args.steer:
        vector = ControlVector.load(path)
        steering_edits += (edits := vector.edits(*how))
        if not edits:
            raise RequestError(
                f"--steer {path} has directions of layers {', '.join(map(str, vector.directions))} alone."
            )
    return steering_edits


def _check_combination(args: argparse.Namespace) -> None:
    named = [called for name, called in SOURCES.items() if getattr(args, name) not in (None, [])]
    if len(named) > 1:
        raise RequestError(f"both {named[0]} and {named[1]} were given: give one of them.")
    if args.output is not None and args.input is None:
        raise RequestError(
            f"--output needs --input, or redirect one prompt's text (> {shlex.quote(args.output)})."
        )
    if args.ray is not None:
        if args.input is None:
            raise RequestError("--ray is for the prompts of a file: give it with --input.")
        if args.ray < 1:
            raise RequestError(f"--ray is {args.ray} and must be at least 1.")
        if args.device != "cpu" or args.tensor_parallel_size * args.pipeline_parallel_size != 1:
            raise RequestError(
                "--ray is for single processes on CPUs: omit --device and the flags of parallelism."
            )
    if args.echo and (args.json or args.input is not None):
        raise RequestError("--echo is for text: a JSON record holds its prompt anyway.")
    if args.color == "surprise" and (args.json or args.input is not None):
        raise RequestError("--color surprise is for text: give --logprobs for a JSON record.")
    for name in ("logprobs", "prompt_logprobs"):
        if not args.json and args.input is None and getattr(args, name) is not None:
            raise RequestError(f"{flag_of(name)} is for records: give --json, or --input.")
    if args.input is None and len(args.soft_prompt or ()) > 1:
        raise RequestError(
            "several --soft-prompt are for the lines of --input to choose from: give one of them."
        )


def _given_prompt(args: argparse.Namespace) -> str | None:
    if args.prompt_text is not None:
        return args.prompt_text
    if args.prompt == [STDIN] or args.file == STDIN:
        return read_text("stdin")
    if args.file is not None:
        return read_text(f"--file {args.file}", args.file)
    return " ".join(args.prompt) if args.prompt else None


def _run_prompt(args: argparse.Namespace, text: str, params: SamplingParams) -> None:
    if not text:
        log("the prompt is empty: the text starts from the BOS token")
    llm, load_seconds = load_llm(args)
    if not args.json:
        _ = llm.tokenizer  # raises if there is none: the output is text
    prompt = llm.read_prompt(text)
    if num_truncated := llm.num_truncated_tokens(prompt, params):
        log(
            f"the first {counted(num_truncated, 'token')} of the prompt exceed the model's positions and are truncated"
        )
    warm_up(llm, args)
    front = text if args.echo else ""
    if is_colored := shows_surprise(args):
        from ..look.html import ansi
    before = llm.engine.throughput
    is_one = params.num_samples == params.num_beams == 1
    finish_reasons = []
    if is_one and not args.json and not args.no_stream:
        emit(front, end="")
        for chunk in llm.stream(prompt, params):
            shown = ansi(chunk.text, chunk.token_id, chunk.logprobs) if is_colored else chunk.text
            emit(shown, end="")
            finish_reasons = [chunk.finish_reason]
        emit()
    else:
        (output,) = llm.generate([prompt], params)
        finish_reasons = [sample.finish_reason for sample in output.outputs]
        if args.json:
            from .batch import record_line

            emit(record_line(None, args.model, llm.dtype, output))
        else:
            for sample in output.outputs:
                if len(output.outputs) > 1:
                    log(f"sample {sample.index + 1} of {len(output.outputs)}:")
                shown = sample.text
                if is_colored:
                    pieces = llm.tokenizer.pieces(sample.token_ids, sample.text)
                    shown = "".join(map(ansi, pieces, sample.token_ids, sample.logprobs))
                emit(front + shown)
    if params.guidance is not None and (num_cut := finish_reasons.count("length")):
        log(f"{counted(num_cut, 'guided text')} cut short by --max-tokens or --max-time")
    seed = f"; seed {params.seed}" if params.temperature else ""
    log(f"{rates(llm.engine.throughput - before)}; load {load_seconds:.2f} s{compiling(args)}{seed}")


GENERATE = Command(
    add_arguments,
    run,
    "[flags] [PROMPT ...]",
    EVERY_DAY,
    "; --guided-* among them constrain the text",
)
