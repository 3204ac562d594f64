"""`tinygpt eval`: perplexity, LAMBADA and ROUGE, one row of a table for each dtype."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.bench.report import aligned, records_table
from tinygpt.cli import loading
from tinygpt.cli.flags import CPU_FLAGS, RANK_FLAGS, Command, add_group, dtypes
from tinygpt.cli.output import emit, log, progress, table_format
from tinygpt.errors import RequestError, invalid, work_started_by
from tinygpt.evaluation.texts import read_articles, read_rows, read_text

if TYPE_CHECKING:
    from tinygpt.llm import LLM

# Title of a column -> its format for a record.
COLUMNS = {
    "ppl": {
        "dtype": "{dtype}",
        "stride": "{stride}",
        "tokens": "{num_tokens}",
        "token perplexity": "{token_perplexity:4}",
        "change": "{change:+.3%}",
        "word perplexity": "{word_perplexity:4}",
        "byte perplexity": "{byte_perplexity:4}",
        "bits per byte": "{bits_per_byte:4}",
    },
    "lambada": {
        "dtype": "{dtype}",
        "protocol": "{protocol}",
        "rows": "{num_rows}",
        "accuracy": "{accuracy:.2%}",
        "perplexity": "{perplexity:4}",
        "change": "{change:+.3%}",
    },
    "rouge": {
        "dtype": "{dtype}",
        "rows": "{num_rows}",
        **{kind: f"{{{kind}:.2f}}" for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
    },
}
FORMATS = ("text", "md", "jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "what to measure: ppl, lambada or rouge, see below"
    parser.add_argument("task", type=str.lower, choices=COLUMNS, metavar="TASK", help=about)
    about = 'text in UTF-8; for lambada, lines of {"text": ...}; for rouge, of {"article": ..., "highlights": ...}'
    parser.add_argument("file", metavar="FILE", type=Path, help=about)
    about = "text and md are tables, jsonl has a line for each row and all digits (default: md; text on a terminal)"
    parser.add_argument("--format", type=str.lower, choices=FORMATS, help=about)
    parser.add_argument("--json", action="store_true", help="as --format jsonl (default: off)")
    ppl = parser.add_argument_group("ppl", "strided perplexity of a text")
    about = (
        "tokens from one window to the next; fewer give each token more context, and take longer "
        "(default: a full window, without overlap)"
    )
    ppl.add_argument("--stride", type=int, metavar="N", help=about)
    about = "accuracy and perplexity of what ends each text, by word and by token; ROUGE of summaries (extra eval)"
    lambada = parser.add_argument_group("lambada, rouge", about)
    lambada.add_argument("--limit", type=int, metavar="N", help="the first N rows alone (default: all)")
    window = {"help": "tokens of a window (default: all positions of the model)"}
    names = (*CPU_FLAGS, "max_model_len", "split_special_tokens", *RANK_FLAGS)
    group = add_group(parser, names, dtype={"type": dtypes, "metavar": "LIST"}, max_model_len=window)
    group.description = "--dtype may name several, separated by commas, to be compared in one table."


def run(args: argparse.Namespace) -> None:
    """Evaluate with each dtype and print the table. Raise RequestError, before any work, for impossible arguments."""
    flag, tasks = ("limit", "lambada or rouge") if args.task == "ppl" else ("stride", "ppl")
    if getattr(args, flag) is not None:
        raise RequestError(f"--{flag} is for eval {tasks}: omit it, or run that.")
    if args.json and args.format not in (None, "jsonl"):
        raise RequestError(f"--json is --format jsonl and --format is {args.format}: give one of them.")
    if args.limit is not None and args.limit < 1:
        raise invalid("--limit", args.limit, "at least 1")
    given = _read(args)
    loading.set_thread_pools(args.threads)
    if len(args.dtype) > 1:  # LLM refuses a single one
        from tinygpt.parallel.runner import open_sources

        ranks = args.tensor_parallel_size, args.pipeline_parallel_size
        open_sources(args.model, args.dtype, ranks, kv_cache_dtype=args.kv_cache_dtype)
    found: list[list[dict[str, Any]]] = []
    try:
        with work_started_by(found):
            for dtype in args.dtype:
                found.append(_evaluate(args, dtype, given))
    finally:  # an interruption leaves the dtypes that were measured
        if found:
            _show(args, found)


def _read(args: argparse.Namespace) -> "str | list[Any]":
    """Read the file before a model is loaded. Raise RequestError if it cannot be used."""
    if args.task == "ppl":
        return read_text("FILE", args.file)
    if args.task == "lambada":
        return read_rows("FILE", args.file)[: args.limit]
    from tinygpt.evaluation.tasks import new_scorer

    articles = read_articles("FILE", args.file)[: args.limit]
    new_scorer()  # raises if the library is missing
    return articles


def _evaluate(args: argparse.Namespace, dtype: str, given: "str | list[Any]") -> list[dict[str, Any]]:
    from tinygpt.evaluation.tasks import NUM_TOGETHER, check_stride
    from tinygpt.llm import LLM

    names = (*CPU_FLAGS, "max_model_len", "split_special_tokens", *RANK_FLAGS)
    arguments = {name: getattr(args, name) for name in names} | {"dtype": dtype, "max_num_seqs": NUM_TOGETHER}
    with LLM(**arguments) as llm:
        if args.stride is not None:
            check_stride(llm, args.stride)
        log(f"{args.task} of {args.file} by {args.model} in {llm.dtype}")
        about = {"task": args.task, "file": str(args.file), "model": args.model, "dtype": llm.dtype}
        return [about | found for found in _measure(args.task, llm, given, args.stride)]


def _measure(task: str, llm: "LLM", given: Any, stride: int | None) -> list[dict[str, Any]]:
    from tinygpt.evaluation import tasks

    if task == "lambada":
        return [
            asdict(found) | {"accuracy": found.accuracy}
            for found in tasks.lambada(llm, given, use_tqdm=progress("row"))
        ]
    if task == "rouge":
        summaries = tasks.summarize(llm, given, use_tqdm=progress("article"))
        return [{"num_rows": len(given)} | tasks.rouge(summaries, given)]
    found = tasks.perplexity(llm, given, stride, use_tqdm=progress("window"))
    names = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
    sizes = {"max_model_len": llm.max_model_len, "stride": llm.max_model_len if stride is None else stride}
    return [sizes | asdict(found) | {name: getattr(found, name) for name in names}]


def _show(args: argparse.Namespace, found: list[list[dict[str, Any]]]) -> None:
    records = [record | _change(record, first) for of in found for record, first in zip(of, found[0], strict=True)]
    if args.json or args.format == "jsonl":
        for record in records:
            emit(json.dumps(record, ensure_ascii=False))
        return
    columns, first = dict(COLUMNS[args.task]), records[0]["dtype"]
    if all(record["dtype"] == first for record in records):
        columns.pop("change", None)
    records = [record | {"change": None} if record["dtype"] == first else record for record in records]
    table = records_table(records, columns, [title for title in columns if title not in ("dtype", "protocol")])
    emit(table if (args.format or table_format()) == "md" else aligned(table))


def _change(record: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """Return the relative change of a perplexity from the first dtype's."""
    if record["task"] == "rouge":
        return {}
    name = "token_perplexity" if "token_perplexity" in record else "perplexity"
    return {"change": record[name] / first[name] - 1}


EVAL = Command(
    "measure a checkpoint's quality: perplexity, LAMBADA, ROUGE", add_arguments, run, "[flags] {ppl,lambada,rouge} FILE"
)
