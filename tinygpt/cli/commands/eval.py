"""`python -m tinygpt eval`: perplexity and LAMBADA, one row of a table for each dtype."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli import loading
from tinygpt.cli.flags import whole_number
from tinygpt.cli.messages import say
from tinygpt.config import DTYPES
from tinygpt.errors import RequestError

if TYPE_CHECKING:
    from tinygpt.llm import LLM

SUMMARY = "measure a checkpoint's quality: perplexity, LAMBADA"
# field of a record -> how the table shows it
PPL_COLUMNS = {
    "dtype": "{}",
    "stride": "{}",
    "num_tokens": "{}",
    "token_perplexity": "{:.4f}",
    "change": "{:+.3%}",
    "word_perplexity": "{:.4f}",
    "byte_perplexity": "{:.5f}",
    "bits_per_byte": "{:.5f}",
}
LAMBADA_COLUMNS = {
    "dtype": "{}",
    "protocol": "{}",
    "num_rows": "{}",
    "accuracy": "{:.2%}",
    "perplexity": "{:.4f}",
    "change": "{:+.3%}",
}
COLUMNS = {"ppl": PPL_COLUMNS, "lambada": LAMBADA_COLUMNS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        choices=COLUMNS,
        metavar="{ppl,lambada}",
        help="what to measure, see below",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help='text in UTF-8; for lambada, lines of {"text": ...}')
    parser.add_argument("--json", action="store_true", help="one line of JSON for each row of the table (default: off)")
    ppl = parser.add_argument_group("ppl", "strided perplexity of a text")
    ppl.add_argument(
        "--stride",
        type=whole_number,
        metavar="N",
        help="tokens from one window to the next; fewer give each token more context, and take longer "
        "(default: a full window, without overlap)",
    )
    lambada = parser.add_argument_group(
        "lambada", "accuracy and perplexity of what ends each text, by word and by token"
    )
    lambada.add_argument("--limit", type=whole_number, metavar="N", help="the first N rows alone (default: all)")
    group = loading.add_model_arguments(parser)
    group.description = "--dtype may name several, separated by commas, to be compared in one table."
    group.add_argument(
        "--max-model-len",
        type=whole_number,
        metavar="N",
        help="tokens of a window (default: all positions of the model)",
    )


def run(args: argparse.Namespace) -> None:
    """Evaluate with each dtype and print the table. RequestError, before any work, for impossible arguments."""
    dtypes = _checked_dtypes(args.dtype)
    _check_flags(args)
    given = _read_text(args.file) if args.task == "ppl" else read_rows(args.file)[: args.limit]
    loading.set_thread_pools(args.threads)
    tables = [_evaluate(args, dtype, given) for dtype in dtypes]
    records = [
        record | _change(record, first) for table in tables for record, first in zip(table, tables[0], strict=True)
    ]
    if args.json:
        for record in records:
            print(json.dumps(record, ensure_ascii=False))
    else:
        print(table(records, COLUMNS[args.task]))


def read_rows(path: Path) -> list[str]:
    """The texts of a JSONL file. RequestError for a line that has none of two words at least."""
    texts = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            texts.append(_text_of(line, f"line {number} of FILE {path}"))
    return texts


def table(records: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Records as markdown."""
    rows = [[name.replace("_", " ").replace("num ", "") for name in columns], ["---"] * len(columns)]
    rows += [[form.format(record[name]) for name, form in columns.items()] for record in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _evaluate(args: argparse.Namespace, dtype: str, given: str | list[str]) -> list[dict[str, Any]]:
    from tinygpt.evaluation.perplexity import NUM_TOGETHER, check_stride
    from tinygpt.llm import LLM

    with LLM(
        args.model,
        dtype,
        threads=args.threads,
        max_num_seqs=NUM_TOGETHER,
        max_model_len=args.max_model_len,
        kv_cache_dtype=args.kv_cache_dtype,
    ) as llm:
        if args.stride is not None:
            check_stride(llm, args.stride)
        say(f"{args.task} of {args.file} by {args.model} in {llm.dtype}")
        about = {"task": args.task, "file": str(args.file), "model": args.model, "dtype": llm.dtype}
        if args.task == "ppl":
            return [about | _perplexity(llm, given, args.stride)]
        return [about | found for found in _lambada(llm, given)]


def _perplexity(llm: "LLM", text: str, stride: int | None) -> dict[str, Any]:
    from tinygpt.evaluation.perplexity import perplexity

    found = perplexity(llm, text, stride, show_progress=True)
    names = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
    sizes = {"max_model_len": llm.max_model_len, "stride": llm.max_model_len if stride is None else stride}
    return sizes | asdict(found) | {name: getattr(found, name) for name in names}


def _lambada(llm: "LLM", texts: list[str]) -> list[dict[str, Any]]:
    from tinygpt.evaluation.perplexity import lambada

    return [asdict(found) | {"accuracy": found.accuracy} for found in lambada(llm, texts, show_progress=True)]


def _change(record: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """By how much of it a perplexity is above that of the first dtype."""
    name = "token_perplexity" if "token_perplexity" in record else "perplexity"
    return {"change": record[name] / first[name] - 1}


def _checked_dtypes(given: str) -> list[str]:
    dtypes = [dtype.strip() for dtype in given.split(",")]
    for dtype in dtypes:
        if dtype not in ("auto", *DTYPES):
            raise RequestError(
                f"--dtype has {dtype!r}: give auto, {', '.join(DTYPES)}, or several of them separated by commas."
            )
    return dtypes


def _check_flags(args: argparse.Namespace) -> None:
    flag, task = ("stride", "ppl") if args.task == "lambada" else ("limit", "lambada")
    if getattr(args, flag) is not None:
        raise RequestError(f"--{flag} is for eval {task}: leave it away, or use that.")
    if args.limit is not None and args.limit < 1:
        raise RequestError(f"--limit is {args.limit} and must be 1 or more.")


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"FILE {path} is no UTF-8, at byte {error.start}: give a file of plain text.") from None
    except OSError as error:
        raise RequestError(f"FILE {path} cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise RequestError(f"FILE {path} has no text: give one that has.")
    return text


def _text_of(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
        if isinstance(text, str) and len(text.split()) > 1:
            return text
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise RequestError(f'{place} is no row of LAMBADA: give {{"text": ...}}, with a text of two words at least.')
