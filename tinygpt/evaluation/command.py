"""`tinygpt eval`: perplexity, LAMBADA and ROUGE by dtype. `tinygpt parity`: a comparison with transformers' results."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.report import FORMATS, aligned, records_table
from ..cli import flags, streams
from ..cli.streams import check_writable, emit, log, progress, read_plain_text, table_format
from ..errors import RequestError, TinyGPTError, invalid, work_started_by
from ..hardware import thread_count
from ..llm_args import WEIGHTS
from ..sampling_params import SamplingParams
from ..weights.config import PRECISIONS

if TYPE_CHECKING:
    from ..llm import LLM
    from .parity import Difference, Golden, Parity
    from .tasks import Article

Record = dict[str, Any]
MODEL = (*flags.CPU_FLAGS, "max_model_len", "split_special_tokens", *flags.RANK_FLAGS)
PROMPT_LENGTHS = (1, 2, 7, 33, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "task",
        type=str.lower,
        choices=tuple(TASKS),
        metavar="TASK",
        help="ppl, lambada or rouge: what to measure, see below",
    )
    add(
        "file",
        metavar="FILE",
        type=Path,
        help='text in UTF-8; for lambada, lines of {"text": ...}; for rouge, of {"article": ..., "highlights": ...}',
    )
    form = parser.add_mutually_exclusive_group().add_argument
    form(
        "--format",
        type=str.lower,
        choices=("text", "md", "jsonl"),
        help="text and md are tables, jsonl has a line for each row and all digits (default: md; text on a terminal)",
    )
    form(
        "--json", dest="format", action="store_const", const="jsonl", help="as --format jsonl (default: off)"
    )
    add = parser.add_argument_group("ppl", "strided perplexity of a text").add_argument
    add(
        "--stride",
        type=int,
        metavar="N",
        help="tokens between the starts of two windows: fewer give more context, and take longer (default: a window)",
    )
    add = parser.add_argument_group(
        "lambada, rouge",
        "accuracy and perplexity of the end of each text, by word and by token; ROUGE of summaries (extra eval)",
    ).add_argument
    add("--limit", type=int, metavar="N", help="the first N rows alone (default: all)")
    window = {"help": "tokens of a window (default: all positions of the model)"}
    group = flags.add_group(
        parser, MODEL, dtype={"type": flags.dtypes, "metavar": "LIST"}, max_model_len=window
    )
    group.description = "--dtype may name several, separated by commas, to be compared in one table."


def run(args: argparse.Namespace) -> None:
    """Evaluate with each dtype and print the table. Raise RequestError, before any work, for impossible arguments."""
    flag, others = ("limit", "lambada or rouge") if args.task == "ppl" else ("stride", "ppl")
    if getattr(args, flag) is not None:
        raise RequestError(f"--{flag} is for eval {others}: omit it, or run that.")
    if args.limit is not None and args.limit < 1:
        raise invalid("--limit", args.limit, "at least 1")
    text = read_plain_text("FILE", args.file)
    flags.set_thread_pools(args.threads)
    task = TASKS[args.task]
    inputs = task.read(f"FILE {args.file}", text)[: args.limit]
    if len(args.dtype) > 1:  # LLM refuses a single one
        from ..ranks.lead import open_sources

        open_sources(flags.llm_args(args), args.dtype)
    of_dtypes: list[list[Record]] = []
    try:
        with work_started_by(of_dtypes):
            for dtype in args.dtype:
                of_dtypes.append(_evaluate(args, dtype, task, inputs))
    finally:  # an interruption leaves the dtypes that were measured
        if of_dtypes:
            _show(args.format, task, of_dtypes)


def _evaluate(args: argparse.Namespace, dtype: str, task: "Task", inputs: "str | list[Any]") -> list[Record]:
    from ..llm import LLM
    from .tasks import NUM_TOGETHER, check_stride

    arguments = {name: getattr(args, name) for name in MODEL} | {"dtype": dtype, "max_num_seqs": NUM_TOGETHER}
    with LLM(**arguments) as llm:
        if args.stride is not None:
            check_stride(llm, args.stride)
        log(f"{args.task} of {args.file} by {args.model} in {llm.dtype}")
        head = {"task": args.task, "file": str(args.file), "model": args.model, "dtype": llm.dtype}
        return [head | record for record in task.measure(llm, inputs, args.stride)]


def _show(form: str | None, task: "Task", of_dtypes: list[list[Record]]) -> None:
    if task.compared is not None:
        for records in of_dtypes:
            for record, first in zip(records, of_dtypes[0], strict=True):
                record["change"] = record[task.compared] / first[task.compared] - 1
    records = [record for records in of_dtypes for record in records]
    if form == "jsonl":
        emit(FORMATS["jsonl"](records))
        return
    columns = dict(task.columns)
    dtype = records[0]["dtype"]
    if all(record["dtype"] == dtype for record in records):
        columns.pop("change", None)
    records = [record | {"change": None} if record["dtype"] == dtype else record for record in records]
    table = records_table(records, columns, columns.keys() - {"dtype", "protocol"})
    emit(table if (form or table_format()) == "md" else aligned(table))


@dataclass(frozen=True)
class Task:
    """read: from the name of a file and its text; may raise RequestError. measure: by a model, with a --stride."""

    read: Callable[[str, str], Any]
    measure: Callable[["LLM", Any, int | None], list[Record]]
    compared: str | None  # field whose relative change from the first dtype's is shown
    columns: dict[str, str]  # title -> its format for a record


def _perplexity(llm: "LLM", text: str, stride: int | None) -> list[Record]:
    from .tasks import perplexity

    measured = perplexity(llm, text, stride, use_tqdm=progress("window"))
    names = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
    sizes = {"max_model_len": llm.max_model_len, "stride": llm.max_model_len if stride is None else stride}
    return [sizes | asdict(measured) | {name: getattr(measured, name) for name in names}]


def _read_rows(name: str, text: str) -> list[str]:
    from .tasks import read_rows

    return read_rows(name, text)


def _lambada(llm: "LLM", rows: list[str], stride: int | None) -> list[Record]:
    from .tasks import lambada

    by_protocol = lambada(llm, rows, use_tqdm=progress("row"))
    return [asdict(measured) | {"accuracy": measured.accuracy} for measured in by_protocol]


def _read_articles(name: str, text: str) -> "list[Article]":
    from .tasks import new_scorer, read_articles

    articles = read_articles(name, text)
    new_scorer()  # RequestError without its library
    return articles


def _rouge(llm: "LLM", articles: "list[Article]", stride: int | None) -> list[Record]:
    from .tasks import rouge, summarize

    summaries = summarize(llm, articles, use_tqdm=progress("article"))
    return [{"num_rows": len(articles)} | rouge(summaries, articles)]


TASKS = {
    "ppl": Task(
        lambda name, text: text,
        _perplexity,
        "token_perplexity",
        {
            "dtype": "{dtype}",
            "stride": "{stride}",
            "tokens": "{num_tokens}",
            "token perplexity": "{token_perplexity:4}",
            "change": "{change:+.3%}",
            "word perplexity": "{word_perplexity:4}",
            "byte perplexity": "{byte_perplexity:4}",
            "bits per byte": "{bits_per_byte:4}",
        },
    ),
    "lambada": Task(
        _read_rows,
        _lambada,
        "perplexity",
        {
            "dtype": "{dtype}",
            "protocol": "{protocol}",
            "rows": "{num_rows}",
            "accuracy": "{accuracy:.2%}",
            "perplexity": "{perplexity:4}",
            "change": "{change:+.3%}",
        },
    ),
    "rouge": Task(
        _read_articles,
        _rouge,
        None,
        {
            "dtype": "{dtype}",
            "rows": "{num_rows}",
            **{kind: f"{{{kind}:.2f}}" for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
        },
    ),
}


def _add_parity_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_checkpoint(parser)
    flags.add_flag(parser, "dtype", default="float32", help=f"{WEIGHTS} (default: float32)")
    flags.add_flag(parser, "device")
    flags.add_flag(parser, "threads")
    add = parser.add_argument
    defaults = ", ".join(f"{precision.tolerance:g} for {dtype}" for dtype, precision in PRECISIONS.items())
    add("--tolerance", type=float, metavar="X", help=f"largest difference of a logit (default: {defaults})")
    default = f"{len(PROMPT_LENGTHS)} built-in ones of {', '.join(map(str, PROMPT_LENGTHS))} token ids"
    add(
        "--input",
        metavar="FILE",
        help=f"prompts, as JSONL of objects with a field prompt: a text or token ids (default: {default})",
    )
    add(
        "-n", "--max-tokens", type=int, default=32, metavar="N", help="greedy tokens after each (default: 32)"
    )
    add(
        "--layers",
        action="store_true",
        help="also show how far each layer's hidden states differ; --tolerance is for logits (default: off)",
    )
    add(
        "--golden",
        metavar="FILE",
        help="compare with this file, prompts included (default: with transformers)",
    )
    add(
        "--save-golden",
        metavar="FILE",
        help="write what transformers computes to this .npz file (default: none)",
    )


def _run_parity(args: argparse.Namespace) -> None:
    """Print the comparison. Raise TinyGPTError if a difference exceeds the tolerance."""
    _check_parity(args)
    flags.set_thread_pools(args.threads)
    folder = _folder_for_transformers(args.model) if args.golden is None else None
    from ..llm import LLM
    from .parity import compare

    with LLM(args.model, args.dtype, args.device, args.threads) as llm:
        if args.layers and llm.config.embed_dim is not None:
            raise RequestError(
                f"--layers needs hidden states of one width, and {args.model} has two: omit it."
            )
        tolerance = PRECISIONS[llm.dtype].tolerance if args.tolerance is None else args.tolerance
        goldens = _computed(args, llm, folder) if folder else _loaded(args, llm)
        log("computing with tinygpt")
        logits = [llm.logits(golden.token_ids) for golden in goldens]
        states = [llm.hidden_states(golden.token_ids) for golden in goldens] if args.layers else None
        parity = compare(goldens, logits, _greedy(llm, goldens), states)
    failures = parity.failures(tolerance)
    head = {
        "model": args.model,
        "dtype": llm.dtype,
        "device": args.device,
        "tolerance": tolerance,
        "compared_with": args.golden or "transformers",
        "passed": not failures,
    }
    if args.json:
        streams.print_json({**head, "failures": failures, **asdict(parity)})
    else:
        _print_parity(head, parity)
    if failures:
        raise TinyGPTError("\n".join(["no parity:", *(f"  {failure}" for failure in failures)]))


def _check_parity(args: argparse.Namespace) -> None:
    if args.golden is not None and (args.input is not None or args.save_golden is not None):
        raise RequestError(
            "--golden has its own prompts and results: give it without --input and --save-golden."
        )
    if args.max_tokens < 0:
        raise invalid("--max-tokens", args.max_tokens, "at least 0")
    if args.tolerance is not None and not 0 <= args.tolerance < float("inf"):
        raise invalid("--tolerance", args.tolerance, "a number from 0 up")
    if args.golden is not None and not Path(args.golden).is_file():
        raise RequestError(f"there is no file --golden {args.golden}.")
    if args.save_golden is not None:
        check_writable("--save-golden", Path(args.save_golden))


def _folder_for_transformers(model: str) -> Path:
    from ..weights.containers.formats import INDEX
    from ..weights.open import open_checkpoint, resolve
    from ..weights.tensor import FILES

    path = resolve(model)
    if open_checkpoint(model).converted_to:
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
    from .parity import load_goldens

    goldens = load_goldens(Path(args.golden))
    V = llm.config.vocab_size
    C = llm.config.n_embd
    L = llm.config.n_layer
    if not goldens:
        raise RequestError(f"{args.golden} holds no prompt.")
    for golden in goldens:
        T = len(golden.token_ids)
        if golden.logits.shape != (T, V) or T + len(golden.greedy_ids) > llm.max_model_len:
            raise RequestError(
                f"{args.golden} is of another model: logits {golden.logits.shape}, here ({T}, {V})."
            )
        if args.layers and (golden.hidden_states is None or golden.hidden_states.shape != (L + 1, T, C)):
            raise RequestError(
                f"{args.golden} has no hidden states of this model: make it with --layers too."
            )
    return goldens


def _computed(args: argparse.Namespace, llm: "LLM", folder: Path) -> "list[Golden]":
    from .parity import compute_goldens, save_goldens

    room = llm.max_model_len
    if args.input is None:  # ids all over the vocabulary, the same in every run
        lengths = sorted({min(length, room) for length in PROMPT_LENGTHS})
        size = llm.config.vocab_size
        prompts = [[7919 * (i + 1) * (i + length) % size for i in range(length)] for length in lengths]
    else:
        prompts = _read_prompts(Path(args.input), llm)
    num_greedy = [min(args.max_tokens, room - len(prompt)) for prompt in prompts]
    log("computing with transformers")
    goldens = compute_goldens(folder, prompts, num_greedy, thread_count(args.threads), args.layers)
    if args.save_golden is not None:
        save_goldens(Path(args.save_golden), goldens)
        log(f"{args.save_golden} holds what transformers computes")
    return goldens


def _read_prompts(path: Path, llm: "LLM") -> list[list[int]]:
    def ids_of(record: streams.PromptRecord) -> list[int]:
        prompt = llm.read_prompt(record.prompt, record.split_special_tokens)
        return llm._inputs.read_ids("logits", prompt.token_ids)

    content = streams.read_bytes(f"--input {path}", path)
    records = streams.read_prompts(path, SamplingParams(), content)
    if not records:
        raise RequestError(f"{path} holds no prompt.")
    return streams.read_lines(path, {record.line: partial(ids_of, record) for record in records})


def _greedy(llm: "LLM", goldens: "list[Golden]") -> list[list[int]]:
    asked = [golden for golden in goldens if golden.greedy_ids]
    params = [SamplingParams(max_tokens=len(at.greedy_ids), temperature=0.0, ignore_eos=True) for at in asked]
    outputs = iter(llm.generate([at.token_ids for at in asked], params, use_tqdm=False) if asked else ())
    return [next(outputs).outputs[0].token_ids if golden.greedy_ids else [] for golden in goldens]


def _print_parity(head: dict[str, Any], parity: "Parity") -> None:
    streams.print_fields("parity", head)
    logits = {
        "positions": f"{parity.num_positions} in {parity.num_prompts} prompts",
        "largest_difference": f"{parity.logits.largest:.3g}",
        "mean_difference": f"{parity.logits.mean:.3g}",
        "top-1 agreement": f"{parity.top_1:.2%}",
        "top-20 agreement": f"{parity.top_20:.2%}",
    }
    streams.print_fields("logits", logits)
    _print_differences(
        "by position", [f"from {start}" for start in parity.by_position], parity.by_position.values()
    )
    if parity.by_layer is not None:
        names = ["embeddings", *(f"after layer {i}" for i in range(len(parity.by_layer) - 2)), "after ln_f"]
        _print_differences("by layer (for information, no tolerance)", names, parity.by_layer)
    streams.print_fields(
        "greedy", {"tokens": parity.num_greedy_tokens, "divergent_runs": len(parity.divergences)}
    )
    if parity.divergences:
        rows = [
            (at.prompt, at.index, at.token_id, at.expected, f"{at.lead:.3g}") for at in parity.divergences
        ]
        streams.print_table(
            "first divergent tokens", [("prompt", "token", "id", "expected", "which led by"), *rows]
        )


def _print_differences(title: str, names: Iterable[str], differences: "Iterable[Difference]") -> None:
    cells = [
        (name, f"{at.largest:.3g}", f"{at.mean:.3g}") for name, at in zip(names, differences, strict=True)
    ]
    streams.print_table(title, [("", "largest", "mean"), *cells])


EVAL = flags.Command(
    add_arguments,
    run,
    "[flags] {ppl,lambada,rouge} FILE [MODEL]",
)
PARITY = flags.Command(
    _add_parity_arguments,
    _run_parity,
    "[flags] [MODEL]",
)
