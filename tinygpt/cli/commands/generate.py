"""`tinygpt generate`: text on stdout for one prompt, or records for a file of prompts."""

import argparse
import shlex
from typing import TYPE_CHECKING

from tinygpt.cli import loading
from tinygpt.cli.batch.records import record_line
from tinygpt.cli.batch.run import run_batch
from tinygpt.cli.batch.tasks import check_workers
from tinygpt.cli.flags import model as model_flags
from tinygpt.cli.flags import sampling
from tinygpt.cli.flags.types import Once, utf8_text, whole_number
from tinygpt.cli.input.text import STDIN, decoded, is_file_name, read_bytes, text_of_stdin
from tinygpt.cli.interactive import run_interactive
from tinygpt.cli.output.cut_texts import Ended, say_cut
from tinygpt.cli.output.messages import put, say, say_truncated
from tinygpt.cli.output.statistics import rates
from tinygpt.errors import RequestError
from tinygpt.guided_grammar import check_grammar
from tinygpt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinygpt.llm import LLM
    from tinygpt.outputs import RequestOutput
    from tinygpt.request.prompts import Prompt

USAGE = "tinygpt generate [flags] [PROMPT ...]"
SUMMARY = "continue a prompt, or every prompt of a file"
# What --help shows; --help-all shows the others too.
EVERY_DAY = (
    *("prompt", "prompt_text", "file", "input", "output", "json", "interactive", "echo"),
    *("max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop", "repetition_penalty", "overflow"),
    *("model", "dtype", "threads", "device"),
)
RARE = "; --guided-* among them say what form the text has to have"
# Where a prompt may come from: the name that it is parsed as -> what it is called.
SOURCES = {"prompt": "a PROMPT", "prompt_text": "--prompt", "file": "--file", "input": "--input"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="*",
        type=utf8_text,
        metavar="PROMPT",
        help="words, joined by a space; - is stdin (default: all of stdin is the prompt, as it is)",
    )
    group = parser.add_argument_group("prompt", "Flags of one letter mean what they do in llama.cpp.")
    group.add_argument(
        "-p",
        "--prompt",
        action=Once,
        dest="prompt_text",
        type=utf8_text,
        metavar="TEXT",
        help="the same as PROMPT, in one word (default: none)",
    )
    group.add_argument(
        "-f",
        "--file",
        action=Once,
        metavar="FILE",
        help="all of a text file is the prompt, as it is; - is stdin (default: none)",
    )
    sampling.add_arguments(parser)
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input",
        action=Once,
        metavar="FILE",
        help="JSONL, one object a line: prompt (a text or token ids), any sampling field or split_special_tokens to "
        "override, and id (the line's number where there is none); - is stdin (default: none)",
    )
    group.add_argument(
        "--output",
        action=Once,
        metavar="FILE",
        help="JSONL, one record for each line of --input as soon as it is finished; ids already in it are skipped, so "
        "that the same command continues an interrupted run; records of another --model or --dtype are refused, and "
        "other settings are not compared (default: stdout, as -)",
    )
    group.add_argument(
        "--workers",
        type=whole_number,
        default=1,
        metavar="N",
        help="processes that share the prompts of --input and one copy of the weights, as far as there are prompts "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--ray",
        action="store_true",
        help="the workers are actors of the Ray cluster at $RAY_ADDRESS, or else of one that is started here; each "
        "host of it needs --model at the same path (default: processes)",
    )
    group.add_argument(
        "--keep-order",
        action="store_true",
        help="write records in the order of --input, each when all before it are written (default: as they finish)",
    )
    group.add_argument("--json", action="store_true", help="print a JSON record (default: the text)")
    group.add_argument(
        "--no-stream", action="store_true", help="print the text once it is complete (default: as it is made)"
    )
    group.add_argument(
        "--interactive",
        action="store_true",
        help="read lines and continue after each, all in one text; :help there says more (default: off)",
    )
    group.add_argument("--echo", action="store_true", help="print the prompt in front of the text (default: off)")
    model_flags.add_group(parser)


def run(args: argparse.Namespace) -> None:
    """Do what the flags ask for. RequestError, before any work, where that is impossible."""
    if args.output == STDIN:
        args.output = None
    _check_combination(args)
    check_workers(args)
    soft_prompt = args.soft_prompt[0][0] if args.soft_prompt else None
    params = sampling.params_of(args, soft_prompt=soft_prompt)
    if params.guidance is not None:
        check_grammar(*params.guidance)
    _note_backslashes(args)
    _note_assignments(args)
    _note_file_name(args)
    if args.input is not None:
        run_batch(args, params)
        return
    _check_has_texts(args)
    if args.interactive:
        run_interactive(args, sampling.with_seed(params), _given_prompt(args))
    else:
        prompt = _given_prompt(args)
        if prompt is None:
            prompt = text_of_stdin()
        _run_prompt(args, prompt, sampling.with_seed(params))


def _check_combination(args: argparse.Namespace) -> None:
    given = [called for name, called in SOURCES.items() if getattr(args, name) not in (None, [])]
    if len(given) > 1:
        raise RequestError(f"both {given[0]} and {given[1]} were given: give one of them.")
    if args.output is not None and args.input is None:
        raise RequestError(
            "--output needs --input, a file of prompts: give that, or redirect the text of one prompt "
            f"(> {shlex.quote(args.output)})."
        )
    if args.echo and (args.json or args.input is not None):
        raise RequestError("--echo is for text: a JSON record holds its prompt anyway.")
    is_text = not args.json and args.input is None
    for name in ("logprobs", "prompt_logprobs"):
        if is_text and getattr(args, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} is for records: give --json, or --input.")
    if args.input is None and len(args.soft_prompt or ()) > 1:
        raise RequestError("several --soft-prompt are for the lines of --input to choose from: give one of them.")
    if args.interactive and STDIN in (*args.prompt, args.file):
        raise RequestError("--interactive reads its lines from stdin: give the first one as a PROMPT, or none.")
    not_interactive = [name for name in ("input", "json", "no_stream", "echo") if getattr(args, name)]
    if args.interactive and not_interactive:
        raise RequestError(f"--{not_interactive[0].replace('_', '-')} is not possible with --interactive.")


def _check_has_texts(args: argparse.Namespace) -> None:
    """RequestError for a model without a tokenizer by its nature, before it is drawn; a record may do without text."""
    loading.set_thread_pools(args.threads)  # before NumPy is imported
    from tinygpt.weights.random_checkpoint import PREFIX, SHAPE_OF, is_random

    shape = args.model.removeprefix(PREFIX)
    if is_random(args.model) and shape.lower() in SHAPE_OF and not args.json:
        raise RequestError(
            f"{args.model} is drawn in memory and has no tokenizer, so that it has no texts: give token ids, as a line "
            f'{{"prompt": [464, 257]}} of --input does, or measure it: tinygpt bench --random {shape}.'
        )


def _note_backslashes(args: argparse.Namespace) -> None:
    """A typed \\n stays two characters, where llama.cpp makes an end of line of it."""
    typed = {"PROMPT": args.prompt, "--prompt": [args.prompt_text or ""], "--stop": args.stop or ()}
    for name, texts in typed.items():
        if any("\\n" in text for text in texts):
            say(f"{name} holds a backslash and an n, as they were typed: for an end of line, type $'\\n'")


def _note_assignments(args: argparse.Namespace) -> None:
    """A typed max_tokens=5 stays a part of the prompt."""
    for word in args.prompt:
        name = word.partition("=")[0]
        if "=" in word and hasattr(args, name.replace("-", "_")):
            say(f"{word} is read as text: for the flag, type --{word.replace('_', '-')}")


def _note_file_name(args: argparse.Namespace) -> None:
    """A typed story.txt stays a text."""
    text = args.prompt_text or " ".join(args.prompt)
    if is_file_name(text):
        flag = "--input" if text.lower().endswith(".jsonl") else "--file"
        say(f"{text} is read as text, and is the name of a file: for what is in it, type {flag} {shlex.quote(text)}")


def _given_prompt(args: argparse.Namespace) -> str | None:
    """The text that the command line has or names; None where it does neither."""
    if args.prompt_text is not None:
        return args.prompt_text
    if args.prompt == [STDIN] or args.file == STDIN:
        return text_of_stdin()
    if args.file is not None:
        if args.file.lower().endswith(".jsonl"):
            say(f"{args.file} is read as one prompt: for one a line, give it as --input")
        return decoded(f"--file {args.file}", read_bytes("--file", args.file, "a text file"))
    return " ".join(args.prompt) if args.prompt else None


def _run_prompt(args: argparse.Namespace, text: str, params: SamplingParams) -> None:
    prompt = None

    def check(llm: "LLM") -> None:
        nonlocal prompt
        if not args.json:
            _ = llm.tokenizer  # text is asked for: raise the error that says why there is none
        prompt = llm.read_prompt(text)  # encoded once
        say_truncated(llm.num_truncated_tokens(prompt, params))

    llm, load_seconds = loading.load_llm(args, check)
    front = text if args.echo else ""
    before = llm.engine.throughput
    is_one = params.n == params.num_beams == (params.best_of or 1) == 1
    if is_one and not args.json and not args.no_stream:
        say_cut(params, [_stream(llm, prompt, params, front)])
    else:
        output = llm.generate([prompt], params)[0]
        if args.json:
            put(record_line(None, args.model, llm.dtype, output))
        else:
            _print_samples(output, front)
        say_cut(params, [(sample.text, sample.finish_reason) for sample in output.outputs])
    say(f"{rates(llm.engine.throughput - before)}; load {load_seconds:.2f} s{sampling.seed_note(params, '; ')}")


def _stream(llm: "LLM", prompt: "Prompt", params: SamplingParams, front: str) -> Ended:
    put(front, end="")
    texts, finish_reason = [], None
    for chunk in llm.stream(prompt, params):
        put(chunk.text, end="")
        texts.append(chunk.text)
        finish_reason = chunk.finish_reason
    put()
    return "".join(texts), finish_reason


def _print_samples(output: "RequestOutput", front: str) -> None:
    """Samples on stdout, one after another; where there are several, each one's number before it on stderr."""
    for sample in output.outputs:
        if len(output.outputs) > 1:
            say(f"sample {sample.index + 1} of {len(output.outputs)}:")
        put(front + sample.text)
