"""`tinygpt bench`: measure the speed of reading prompts and of generating, next to the limits of the machine."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from ..cli.flags import RANK_FLAGS, Command, add_flag, dtypes, has_ranks, set_thread_pools, whole_numbers
from ..cli.streams import check_writable, counted, emit, log, read_plain_text, table_format, write_results
from ..errors import RequestError, TinyGPTError, invalid, work_started_by
from ..llm_args import CHECKPOINT, LLMArgs
from .report import FORMATS, Record, aligned, cells_of, check_picture, draw_records, table
from .studies import STUDIES, Options, draw_study, study_text

# A flag that has no meaning next to another is refused.
CASES = ("batch_sizes", "prompt_lengths", "new_tokens", "kv_cache_dtype")
RUNS = ("dtype", "threads", "repetitions")
OF_PRESETS = ("small", "text", "remote")
NOT_OF_COMPARISONS = ("model", "random", *CASES, *RUNS, "device", "preset", *OF_PRESETS, "plot")
# Records of one test have these fields in common. llama-bench's own records have neither a dtype nor a batch size.
TEST_FIELDS = (
    "model_filename",
    "model_type",
    "dtype",
    "type_k",
    "n_threads",
    "batch_size",
    "n_prompt",
    "n_gen",
    "n_depth",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model", "LIST is one or several, separated by commas.")
    add = model.add_mutually_exclusive_group().add_argument
    add("-m", "--model", default="demo", help=f"{CHECKPOINT} (default: demo)")
    add(
        "--random",
        metavar="SHAPE",
        help="random weights, shaped as 124M, 355M, 774M, 1.5B or tiny (default: none)",
    )
    add_flag(model, "dtype", type=dtypes, metavar="LIST", default=("auto",))
    add_flag(model, "kv_cache_dtype")
    add_flag(model, "threads", type=whole_numbers, metavar="LIST")
    device = '"cpu"; "cuda": an NVIDIA GPU, timed by its own clock (default: cpu)'
    add_flag(model, "device", choices=("cpu", "cuda"), help=device)
    for name in RANK_FLAGS:
        add_flag(model, name)
    about = "each combination is measured, with each dtype and number of threads."
    add = parser.add_argument_group("cases", about).add_argument
    add(
        "--batch-sizes",
        type=whole_numbers,
        default=(1, 8),
        metavar="LIST",
        help="sequences at once (default: 1,8)",
    )
    add("--prompt-lengths", type=whole_numbers, default=(128,), metavar="LIST", help="tokens (default: 128)")
    add(
        "--new-tokens",
        type=whole_numbers,
        default=(64,),
        metavar="LIST",
        help="tokens to generate, 0 or at least 2 (default: 64)",
    )
    add(
        "--repetitions",
        type=int,
        metavar="N",
        help="runs of each case, after a warm-up (default: 5, or the preset's)",
    )
    about = "in place of the cases above; they have their own."
    add = parser.add_argument_group("published studies", about).add_argument
    listed = "; ".join(f"{study.name}: {study.summary}" for study in STUDIES.values())
    add(
        "--preset",
        type=str.lower,
        choices=STUDIES,
        metavar="NAME",
        help=f"repeat a study and show its figures: {listed} (default: none)",
    )
    add("--small", action="store_true", help="few and short cases of it, a quick look (default: off)")
    add("--text", metavar="FILE", help="UTF-8 text, for the perplexity of onnx-study (default: none)")
    add(
        "--remote",
        action="store_true",
        help="batch-inference also with the model behind `serve` (default: off)",
    )
    output = parser.add_argument_group("output")
    about = (
        "text and md are tables; the others have llama-bench's keys and more (default: what the name of --output ends "
        "in, or md; text on a terminal)"
    )
    form = output.add_mutually_exclusive_group().add_argument
    form("--format", type=str.lower, choices=FORMATS, help=about)
    form("--json", dest="format", action="store_const", const="json", help="as --format json (default: off)")
    add = output.add_argument
    add("--output", type=Path, metavar="FILE", help="also write the results into a file (default: none)")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="also draw them, into a file named .png or .svg (default: none)",
    )
    add(
        "--compare",
        type=Path,
        nargs=2,
        metavar="FILE",
        help="show the change between two files of cases, as json or jsonl, and measure nothing (default: off)",
    )


def run(args: argparse.Namespace) -> None:
    """Measure, and print or write the results. Raise RequestError, before any work, if that is impossible."""
    _check_flags(args)
    if args.compare is not None:
        _compare(args)
        return
    _prepare(args)
    (_run_cases if args.preset is None else _run_preset)(args)


def _check_flags(args: argparse.Namespace) -> None:
    if args.compare is not None:
        _refuse(args, NOT_OF_COMPARISONS, "--compare measures nothing")
    if args.preset is None:
        _refuse(args, OF_PRESETS, "there is no --preset")
    else:
        _refuse(args, CASES, "--preset has cases of its own")
        if args.threads is not None and len(args.threads) > 1:
            raise RequestError(
                f"--threads has {len(args.threads)} numbers and a preset runs with one: give one."
            )
    if has_ranks(args) and (args.compare or args.preset):
        raise RequestError("--tensor-parallel-size and --pipeline-parallel-size are for cases alone.")
    if args.random is not None and args.checkpoint is not None:
        raise RequestError(
            f"--random {args.random} and MODEL {args.checkpoint} are two models: give one of them."
        )
    if args.device == "cuda":
        _refuse(args, ("threads", "remote"), "--device cuda measures a GPU in this process")
        if args.preset == "cpu-study":
            raise RequestError(
                "--preset cpu-study is a study of CPUs: omit --device cuda, or give another preset."
            )
    ending = "" if args.output is None else args.output.suffix.lower().removeprefix(".")
    default = table_format() if args.output is None else "md"
    args.format = args.format or (ending if ending in FORMATS else default)
    inputs = [path.resolve() for path in (*(args.compare or ()), *([Path(args.text)] if args.text else []))]
    for flag in ("output", "plot"):
        if (path := getattr(args, flag)) is not None:
            if path.resolve() in inputs:
                raise RequestError(f"--{flag} {path} is also read: name another file for the results.")
            check_writable(f"--{flag}", path)
            inputs.append(path.resolve())


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    flags = [f"--{name.replace('_', '-')}" for name in names if name in args.given]
    if flags:
        raise RequestError(f"{why}: omit {', '.join(flags)}.")


def _prepare(args: argparse.Namespace) -> None:
    """Size the thread pools before any library is imported."""
    if args.threads is None and has_ranks(args):
        from ..ranks.mpi import process_world, rank_threads

        args.threads = (rank_threads(None, process_world()),)
    threads = args.threads or (None,)
    set_thread_pools(None if None in threads else max(threads))
    if args.random is not None:
        from ..weights.checkpoint import PREFIX, SHAPE_OF, SHAPES

        if args.random.lower() not in SHAPE_OF:
            raise invalid("--random", args.random, f"one of {', '.join(SHAPES)}")
        args.model = f"{PREFIX}{SHAPE_OF[args.random.lower()]}"
    if args.plot is not None:
        check_picture(args.plot)


def _run_cases(args: argparse.Namespace) -> None:
    from .plan import Grid, make_plan
    from .sweep import run_plan

    names = ("model", "device", "kv_cache_dtype", *RANK_FLAGS)
    llm_args = LLMArgs(**{name: getattr(args, name) for name in names})
    repetitions = 5 if args.repetitions is None else args.repetitions
    cases = args.batch_sizes, args.prompt_lengths, args.new_tokens, repetitions
    plan = make_plan(llm_args, Grid(args.dtype, args.threads or (None,), *cases))
    log(f"{counted(len(plan), 'case')} of {args.model}")
    records: list[Record] = []
    try:
        with work_started_by(records):
            run_plan(plan, records, tell=log)
    finally:  # an interruption leaves the cases that were measured
        if records:
            _hand_over(args, records, lambda: draw_records(records, args.plot))


def _run_preset(args: argparse.Namespace) -> None:
    from .sweep import run_study

    study = STUDIES[args.preset]
    log(f"{study.name} with {args.model}")
    threads = None if args.threads is None else args.threads[0]
    text = None if args.text is None else read_plain_text("--text", args.text)
    options = Options(
        args.model, args.dtype, threads, args.repetitions, args.small, text, args.remote, args.device
    )
    records = []
    notes = ["Interrupted: cases are missing."]
    try:
        with work_started_by(records):
            notes = run_study(study, options, records)
    finally:
        if records:
            text = study_text(study, options, records, notes)
            _hand_over(args, records, lambda: draw_study(study, options, records, args.plot), text)


def _compare(args: argparse.Namespace) -> None:
    compared = compare(*map(read_records, args.compare))
    _write(args, compared, comparison_table(compared))
    if all(record["ratio"] is None for record in compared):
        raise TinyGPTError("no test is in both files of --compare: measure the same cases of one model.")


def read_records(path: Path) -> list[Record]:
    """Read a JSON or JSONL file of bench, or of llama-bench. Raise RequestError for anything else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        try:
            value = json.loads(text)
        except ValueError:
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
        records = value if isinstance(value, list) else [value]
        if records and all(record["samples_ts"] and record["model_filename"] for record in records):
            return records
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise RequestError(
        f"{path} holds no records of bench: write them with --format json or jsonl, without --preset."
    )


def compare(old: list[Record], new: list[Record]) -> list[Record]:
    """Return a record for each test: tokens a second and their spread on both sides, null on a side without it."""
    before, after = _by_test(old), _by_test(new)
    compared = []
    for key in dict.fromkeys((*before, *after)):
        sides = _side("old", before.get(key, [])) | _side("new", after.get(key, []))
        ratio = sides["new_ts"] / sides["old_ts"] if sides["new_ts"] and sides["old_ts"] else None
        compared.append(dict(zip(TEST_FIELDS, key, strict=True)) | sides | {"ratio": ratio})
    return compared


def comparison_table(compared: list[Record]) -> str:
    """Return the comparison as markdown: medians, the change, and the slowest and fastest run of each side."""
    header = ["test", "old, tokens/s", "new, tokens/s", "change"]
    forms = [f"{{{side}_ts:4}} ({{{side}_low_ts:4}} to {{{side}_high_ts:4}})" for side in ("old", "new")]
    changes = ["" if record["ratio"] is None else f"{record['ratio'] - 1:+.1%}" for record in compared]
    cells = [cells_of(record, forms) for record in compared]
    rows = [
        [_test_name(record), *sides, change]
        for record, sides, change in zip(compared, cells, changes, strict=True)
    ]
    note = (
        "Medians, with the slowest and the fastest run in brackets. A change within both ranges may be noise."
    )
    return f"{table(header, rows, header[1:])}\n\n- {note}"


def _by_test(records: list[Record]) -> dict[tuple, list[float]]:
    samples: dict[tuple, list[float]] = {}
    for record in records:
        samples.setdefault(tuple(record.get(name) for name in TEST_FIELDS), []).extend(record["samples_ts"])
    return samples


def _side(name: str, samples: list[float]) -> Record:
    figures = (
        (statistics.median(samples), min(samples), max(samples), len(samples)) if samples else (None,) * 4
    )
    return dict(
        zip((f"{name}_ts", f"{name}_low_ts", f"{name}_high_ts", f"{name}_samples"), figures, strict=True)
    )


def _test_name(record: Record) -> str:
    kind = f"tg{record['n_gen']}" if record["n_gen"] else f"pp{record['n_prompt']}"
    depth = f" @ d{record['n_depth']}" if record["n_depth"] else ""
    parts = [
        record["model_filename"],
        record["dtype"] or record["model_type"],
        f"KV cache {record['type_k']}",
    ]
    batch = [] if record["batch_size"] is None else [f"batch {record['batch_size']}"]
    return ", ".join([*parts, f"threads {record['n_threads']}", *batch, f"{kind}{depth}"])


def _hand_over(
    args: argparse.Namespace, records: list[Record], draw: Callable[[], None], markdown: str | None = None
) -> None:
    """Write results to --output or stdout, and draw --plot even if they could not be written."""
    try:
        _write(args, records, markdown)
    finally:
        if args.plot is not None:
            draw()
            log(f"{args.plot} is drawn")


def _write(args: argparse.Namespace, records: list[Record], markdown: str | None = None) -> None:
    """`markdown` replaces the table of cases. With --output, stdout has the table too."""
    tables = {} if markdown is None else {"md": markdown, "text": aligned(markdown)}
    write_results(tables.get(args.format) or FORMATS[args.format](records), args.output)
    if args.output is not None:
        emit(tables.get(table_format()) or FORMATS[table_format()](records))
        log(f"the results are in {args.output}")


BENCH = Command(add_arguments, run, "[flags] [MODEL]")
