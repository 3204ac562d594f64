"""`tinygpt bench`: how fast a model reads prompts and generates, beside what the machine could do."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from tinygpt.bench.formats import FORMATS, Record, aligned
from tinygpt.bench.presets import PRESETS, WITH_PERPLEXITY, WITH_REMOTE
from tinygpt.cli import loading
from tinygpt.cli.flags.model import CHECKPOINT, DTYPE, FLAGS, RANK_FLAGS, add_flag
from tinygpt.cli.flags.types import dtypes, lowered, one_of, whole_number, whole_numbers
from tinygpt.cli.output.messages import counted, put, say
from tinygpt.cli.output.report import table_format
from tinygpt.cli.output.results_file import check_writable, write
from tinygpt.errors import RequestError, TinyGPTError, work_started_by

SUMMARY = "measure speed: reading prompts and generating, beside what the machine could do"
# Flags have no argparse default, so that one given beside another that makes it meaningless is noticed.
CASES = {"batch_sizes": (1, 8), "prompt_lengths": (128,), "new_tokens": (64,)}
RUNS = {"dtype": ("auto",), "threads": (None,), "repetitions": 5}
CACHE = "kv_cache_dtype"  # of cases alone: a study has the cache that it had
CPU_STUDY = "cpu-study"
OF_PRESETS = ("small", "text", "remote")
NOT_OF_COMPARISONS = ("model", "random", *CASES, *RUNS, CACHE, "device", "preset", *OF_PRESETS, "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser.add_argument_group("model", "LIST is one or several, separated by commas."))
    cases = parser.add_argument_group("cases", "each combination is measured, with each dtype and number of threads.")
    cases.add_argument("--batch-sizes", type=whole_numbers, metavar="LIST", help="sequences at once (default: 1,8)")
    cases.add_argument("--prompt-lengths", type=whole_numbers, metavar="LIST", help="tokens (default: 128)")
    cases.add_argument(
        "--new-tokens",
        type=whole_numbers,
        metavar="LIST",
        help="tokens to generate after the prompt, 2 or more, as the first one comes with the prompt; 0 for no "
        "generation (default: 64)",
    )
    cases.add_argument(
        "--repetitions",
        type=whole_number,
        metavar="N",
        help="runs of each case, after one to warm up (default: 5, and a preset's own)",
    )
    studies = parser.add_argument_group(
        "published studies",
        "in place of the cases above.\nThey take --model or --random, --dtype, one number of --threads, --repetitions\n"
        "and the flags of output. One that is interrupted leaves what it has measured,\n"
        "without the study's table and without a picture.",
    )
    listed = "; ".join(f"{name}: {summary}" for name, summary in PRESETS.items())
    studies.add_argument(
        "--preset",
        type=lowered(*PRESETS),
        choices=PRESETS,
        metavar="NAME",
        help=f"repeat a study and show its figures: {listed} (default: none)",
    )
    studies.add_argument("--small", action="store_true", help="few and short cases of it, a quick look (default: off)")
    studies.add_argument(
        "--text", metavar="FILE", help=f"UTF-8 text, for the perplexity of {WITH_PERPLEXITY} (default: none)"
    )
    studies.add_argument(
        "--remote",
        action="store_true",
        help=f"{WITH_REMOTE} also with the model in another process, behind `serve` (default: off)",
    )
    _add_output_arguments(parser.add_argument_group("output"))


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("-m", "--model", help=f"{CHECKPOINT} (default: demo)")
    source.add_argument(
        "--random",
        metavar="SHAPE",
        help="random weights in GPT-2's shape of 124M, 355M, 774M or 1.5B, or tiny; no download (default: none)",
    )
    group.add_argument("--dtype", type=dtypes, metavar="LIST", help=f"{DTYPE} (default: auto)")
    add_flag(group, CACHE, default=None, help=f"{FLAGS[CACHE]['help'].partition(' (')[0]} (default: auto)")
    add_flag(group, "threads", type=whole_numbers, metavar="LIST")
    about = '"cpu"; "cuda": an NVIDIA GPU, timed by its own clock (default: cpu)'
    add_flag(group, "device", type=one_of("cpu", "cuda"), default=None, help=about)
    for name in RANK_FLAGS:
        add_flag(group, name)


def _add_output_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--format",
        type=lowered(*FORMATS),
        choices=FORMATS,
        help="text and md are tables; the others have llama-bench's keys and more for the cases above, and keys of "
        "their own for a preset and for --compare (default: what the name of --output ends in, or md; text on a "
        "terminal)",
    )
    group.add_argument("--json", action="store_true", help="as --format json (default: off)")
    group.add_argument("--output", type=Path, metavar="FILE", help="also write the results into a file (default: none)")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw them, into a file named .png or .svg (default: none)"
    )
    group.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="OLD NEW: show what changed between two files of cases, in --format json or jsonl, and measure nothing; "
        "OLD NEW OLD NEW ...: files measured in turns, which tell a change from a machine that was busy in between. "
        "Takes --format and --output alone (default: off)",
    )


def run(args: argparse.Namespace) -> None:
    """Measure, and print or write the results. RequestError, before any work, for what is impossible."""
    _check_flags(args)
    if args.compare is not None:
        _compare(args)
    else:
        _prepare(args)
        (_run_cases if args.preset is None else _run_preset)(args)


def _check_flags(args: argparse.Namespace) -> None:
    """RequestError for what needs no library and no model to be seen."""
    if _is_on_ranks(args) and (args.compare is not None or args.preset is not None):
        raise RequestError("--tensor-parallel and --pipeline-parallel are for cases: omit --preset and --compare.")
    if args.compare is not None:
        _refuse(args, NOT_OF_COMPARISONS, "--compare measures nothing")
    args.device = args.device or "cpu"
    if args.device == "cuda":
        _refuse(args, ("threads", "remote"), "--device cuda measures a GPU in this process")
        if _is_on_ranks(args):
            raise RequestError("--tensor-parallel and --pipeline-parallel are for the CPU: omit --device cuda.")
        if args.preset == CPU_STUDY:
            raise RequestError(f"--preset {CPU_STUDY} is a study of CPUs: omit --device cuda, or give another preset.")
    if args.preset is not None:
        _refuse(args, (*CASES, CACHE), "--preset has cases of its own")
        if args.threads is not None and len(args.threads) > 1:
            raise RequestError(f"--threads has {len(args.threads)} numbers and a preset runs with one: give one.")
    else:
        _refuse(args, OF_PRESETS, "there is no --preset")
    if args.json and args.format not in (None, "json"):
        raise RequestError(f"--json is --format json and --format is {args.format}: give one of them.")
    ending = "" if args.output is None else args.output.suffix.lower().removeprefix(".")
    unsaid = table_format() if args.output is None else "md"
    args.format = "json" if args.json else args.format or (ending if ending in FORMATS else unsaid)
    if args.output is not None and args.output == args.plot:
        raise RequestError(f"--output and --plot are both {args.plot}: name two files.")
    if args.output is not None and args.output.resolve() in [path.resolve() for path in args.compare or ()]:
        raise RequestError(
            f"--output {args.output} is one of the files of --compare: name another, so that it is kept."
        )
    if args.text is not None and Path(args.text) in (args.output, args.plot):
        raise RequestError(f"--text {args.text} would be written over: name another file for the results.")
    for flag in ("output", "plot"):
        if getattr(args, flag) is not None:
            check_writable(f"--{flag}", getattr(args, flag))


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)]
    if given:
        raise RequestError(f"{why}: omit {', '.join(given)}.")


def _prepare(args: argparse.Namespace) -> None:
    """Size the thread pools, before any library is imported, and check what needs these."""
    if args.threads is None and _is_on_ranks(args):
        from tinygpt.parallel.follower import rank_threads
        from tinygpt.parallel.mpi import process_world

        args.threads = (rank_threads(None, process_world()),)
    threads = args.threads or (None,)
    loading.set_thread_pools(None if None in threads else max(threads))
    args.model = args.model or "demo"
    if args.random is not None:
        from tinygpt.weights.random_checkpoint import PREFIX, SHAPE_OF, SHAPES

        if args.random.lower() not in SHAPE_OF:
            raise RequestError(f"--random is {args.random!r} and must be one of {', '.join(SHAPES)}.")
        args.model = f"{PREFIX}{SHAPE_OF[args.random.lower()]}"
    if args.plot is not None:
        from tinygpt.bench.plot import check

        check(args.plot)


def _run_cases(args: argparse.Namespace) -> None:
    for name, default in {**CASES, **RUNS, CACHE: "auto"}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    from tinygpt.bench.plan import make_plan, run_plan
    from tinygpt.bench.plot import check_lines, plot

    cases = args.batch_sizes, args.prompt_lengths, args.new_tokens
    ranks = args.tensor_parallel_size, args.pipeline_parallel_size
    how = args.repetitions, ranks, args.device, args.kv_cache_dtype
    plan = make_plan(args.model, args.dtype, args.threads, *cases, *how)
    if args.plot is not None:
        check_lines(plan.outline)
    say(f"{counted(len(plan), 'case')} of {args.model}")
    records: list[Record] = []
    try:
        with work_started_by(records):
            run_plan(plan, records, tell=say)
    finally:  # what was measured before an interruption is not lost
        if records:
            _hand_over(args, records, lambda: plot(records, args.plot))


def _is_on_ranks(args: argparse.Namespace) -> bool:
    return (args.tensor_parallel_size, args.pipeline_parallel_size) != (1, 1)


def _run_preset(args: argparse.Namespace) -> None:
    from tinygpt.bench.presets import run_preset
    from tinygpt.bench.presets.options import PresetOptions
    from tinygpt.bench.presets.report import measured_table

    threads = None if args.threads is None else args.threads[0]
    sizes = args.repetitions, args.small, args.text, args.remote
    options = PresetOptions(args.model, args.dtype or RUNS["dtype"], threads, *sizes, args.device)
    say(f"{args.preset} with {args.model}")
    records: list[Record] = []
    try:
        with work_started_by(records):
            report = run_preset(args.preset, options, records)
    except BaseException:  # what was measured before an interruption is not lost
        if records:
            _write(args, records, measured_table(records))
        raise
    _hand_over(args, report.records, lambda: report.plot(args.plot), report.text)


def _compare(args: argparse.Namespace) -> None:
    from tinygpt.bench.compare import compare, read_records, to_markdown

    _check_pairs(args.compare)
    found = [read_records(path) for path in args.compare]
    old, new = ([record for records in side for record in records] for side in (found[::2], found[1::2]))
    comparison = compare(old, new)
    _write(args, comparison.records, to_markdown(comparison))
    if not comparison.changes:
        raise TinyGPTError(
            "no test is on both sides of --compare: measure both with the same model, --dtype, --threads, "
            "--batch-sizes, --prompt-lengths and --new-tokens."
        )


def _check_pairs(paths: list[Path]) -> None:
    if len(paths) % 2:
        raise RequestError(f"--compare has {counted(len(paths), 'file')}: give pairs, OLD NEW or OLD NEW OLD NEW ...")
    for side in (paths[::2], paths[1::2]):
        for path in side:
            if side.count(path) > 1:
                raise RequestError(f"--compare has {path} more than once on one side: give another measurement.")


def _hand_over(
    args: argparse.Namespace, records: list[Record], draw: Callable[[], None], markdown: str | None = None
) -> None:
    """Results to --output or stdout, and to --plot, whether or not they could be written."""
    try:
        _write(args, records, markdown)
    finally:
        if args.plot is not None:
            draw()
            say(f"{args.plot} is drawn")


def _write(args: argparse.Namespace, records: list[Record], markdown: str | None = None) -> None:
    """`markdown` is the table of records that have their own. With --output, stdout has the table too."""
    tables = {} if markdown is None else {"md": markdown, "text": aligned(markdown)}
    write(tables.get(args.format) or FORMATS[args.format](records), args.output)
    if args.output is not None:
        put(tables.get(table_format()) or FORMATS[table_format()](records))
        say(f"the results are in {args.output}")
