"""`python -m tinygpt bench`: how fast a model reads prompts and generates, beside what the machine could do."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from tinygpt.bench.formats import FORMATS, Record
from tinygpt.bench.presets import PRESETS
from tinygpt.commands import loading
from tinygpt.commands.flags import reader, whole_number
from tinygpt.commands.messages import counted, say
from tinygpt.config import DTYPES
from tinygpt.errors import RequestError

SUMMARY = "measure speed: reading prompts and generating, beside what the machine could do"
# Flags have no default of argparse's, so that one which has no meaning beside another is seen.
CASES = {"batch_sizes": (1, 8), "prompt_lengths": (128,), "new_tokens": (64,)}
RUNS = {"dtype": ("auto",), "threads": (None,), "repetitions": 5}
OF_PRESETS = ("small", "text")
NOT_OF_COMPARISONS = ("model", "random", *CASES, *RUNS, "preset", *OF_PRESETS, "plot")


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _dtypes(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


whole_numbers = reader(_whole_numbers, "a whole number, or several separated by commas")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser.add_argument_group("model", "LIST is one or several, separated by commas."))
    cases = parser.add_argument_group("cases", "each combination is measured, with each dtype and number of threads.")
    cases.add_argument("--batch-sizes", type=whole_numbers, metavar="LIST", help="sequences at once (default: 1,8)")
    cases.add_argument("--prompt-lengths", type=whole_numbers, metavar="LIST", help="tokens (default: 128)")
    cases.add_argument(
        "--new-tokens",
        type=whole_numbers,
        metavar="LIST",
        help="tokens to generate after the prompt; 0 is no generation (default: 64)",
    )
    cases.add_argument(
        "--repetitions", type=whole_number, metavar="N", help="runs of each case, after one to warm up (default: 5)"
    )
    studies = parser.add_argument_group("published studies", "in place of the cases above.")
    listed = "; ".join(f"{name}: {summary}" for name, summary in PRESETS.items())
    studies.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"repeat a study and show its figures: {listed} (default: none)",
    )
    studies.add_argument("--small", action="store_true", help="few and short cases of it, a quick look (default: off)")
    studies.add_argument("--text", metavar="FILE", help="UTF-8 for its perplexity, where it has that (default: none)")
    _add_output_arguments(parser.add_argument_group("output"))


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--model", help='"demo" (embedded), a local folder or a Hub id (default: demo)')
    source.add_argument(
        "--random",
        metavar="SHAPE",
        help="random weights in GPT-2's shape of 124M, 355M, 774M or 1.5B; no download (default: none)",
    )
    group.add_argument(
        "--dtype",
        type=_dtypes,
        metavar="LIST",
        help=f"precision of the weights: {', '.join(DTYPES)}; auto is a converted checkpoint's own, and float32 for "
        "any other (default: auto)",
    )
    group.add_argument(
        "--threads",
        type=whole_numbers,
        metavar="LIST",
        help="threads that compute (default: one for each physical core)",
    )


def _add_output_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", choices=FORMATS, help="all but md have llama-bench's keys (default: md)")
    group.add_argument("--json", action="store_true", help="as --format json (default: off)")
    group.add_argument("--output", type=Path, metavar="FILE", help="where to write the results (default: stdout)")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them too, into a file named .png or .svg (default: not)"
    )
    group.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("OLD", "NEW"),
        help="show what changed between two files of --format json or jsonl, and measure nothing (default: off)",
    )


def run(args: argparse.Namespace) -> None:
    """Measure, and print or write the results. RequestError, before any work, for what is impossible."""
    _check_flags(args)
    args.model = f"random:{args.random}" if args.random is not None else args.model or "demo"
    if args.compare is not None:
        _compare(args)
    elif args.preset is not None:
        _run_preset(args)
    else:
        _run_cases(args)


def _check_flags(args: argparse.Namespace) -> None:
    """RequestError for what needs no model to be seen."""
    if args.compare is not None:
        _refuse(args, NOT_OF_COMPARISONS, "--compare measures nothing")
    if args.preset is not None:
        _refuse(args, CASES, "--preset has cases of its own")
    else:
        _refuse(args, OF_PRESETS, "there is no --preset")
    if args.json and args.format not in (None, "json"):
        raise RequestError(f"--json is --format json and --format is {args.format}: give one of them.")
    args.format = "json" if args.json else args.format or "md"
    for flag in ("output", "plot"):
        _check_writable(f"--{flag}", getattr(args, flag))
    if args.plot is not None:
        from tinygpt.bench.plot import check

        check(args.plot)


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)]
    if given:
        raise RequestError(f"{why}: leave {', '.join(given)} away.")


def _check_writable(flag: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"{flag} {path} is a folder: name a file in it.")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"the folder of {flag} {path} does not exist: create it first.")


def _run_cases(args: argparse.Namespace) -> None:
    for name, default in {**CASES, **RUNS}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    loading.set_thread_pools(None if None in args.threads else max(args.threads))
    from tinygpt.bench.plan import make_plan, run_plan
    from tinygpt.bench.plot import plot

    cases = args.batch_sizes, args.prompt_lengths, args.new_tokens
    plan = make_plan(args.model, args.dtype, args.threads, *cases, args.repetitions)
    say(
        f"{counted(len(plan), 'case')} of {args.model} (10 to 20 s more for a dtype whose kernels are still to compile)"
    )
    records = list(run_plan(plan, show_progress=True))
    _write(args, records)
    if args.plot is not None:
        plot(records, args.plot)
        say(f"{args.plot} is drawn")


def _run_preset(args: argparse.Namespace) -> None:
    if args.threads is not None and len(args.threads) > 1:
        raise RequestError(f"--threads has {len(args.threads)} numbers and a preset runs with one: give one.")
    threads = None if args.threads is None else args.threads[0]
    loading.set_thread_pools(threads)
    from tinygpt.bench.presets import run_preset
    from tinygpt.bench.presets.options import PresetOptions

    dtypes = ("auto",) if args.dtype is None else args.dtype
    say(f"{args.preset} with {args.model} (10 to 20 s more for a dtype whose kernels are still to compile)")
    report = run_preset(
        args.preset, PresetOptions(args.model, dtypes, threads, args.repetitions, args.small, args.text)
    )
    _write(args, report.records, report.text)
    if args.plot is not None:
        report.plot(args.plot)
        say(f"{args.plot} is drawn")


def _compare(args: argparse.Namespace) -> None:
    from tinygpt.bench.compare import compare, read_records, to_markdown

    comparison = compare(*map(read_records, args.compare))
    _write(args, comparison.records, to_markdown(comparison))


def _write(args: argparse.Namespace, records: list[Record], markdown: str | None = None) -> None:
    """To --output or stdout. `markdown` is what --format md shows of records that have a table of their own."""
    text = markdown if args.format == "md" and markdown is not None else FORMATS[args.format](records)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(f"{text}\n", encoding="utf-8")
        say(f"the results are in {args.output}")
