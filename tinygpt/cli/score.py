"""`tinygpt score`: how probable texts, words and tokens are. `tinygpt lens`: what each layer would say after them."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..look import bits
from .flags import Command, add_group, load_llm, soft_prompt_of
from .streams import (
    STDIN,
    check_writable,
    counted,
    emit,
    log,
    print_json,
    print_table,
    read_lines,
    read_object,
    read_text,
    write_results,
)

if TYPE_CHECKING:
    from ..look.html import Lens
    from ..outputs import ContinuationScore

Text = tuple[int | str, str]  # with its id
EVERY_DAY = ("text", "prompt", "input", "json", "model", "dtype", "threads", "device")
MAX_TITLE = 60  # characters
LENS_MODEL = ("model", "dtype", "threads", "device", "lora", "revision", "split_special_tokens")
PAGE = '<!doctype html><meta charset="utf-8"><title>logit lens</title>'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(temperature=0.0)  # nothing is drawn
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="texts, each in quotation marks; - is stdin (default: all of stdin, as it is)",
    )
    parser.add_argument(
        "-p",
        "--prompt",
        default="",
        metavar="TEXT",
        help="a text that each TEXT follows, and that is not scored itself (default: none, the BOS token)",
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        help='a text on each line; if it ends in .jsonl, {"text": ...} and optionally id (default: none)',
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line for each text (default: a table)"
    )
    add_group(parser)


def run(args: argparse.Namespace) -> None:
    if args.text and args.input is not None:
        raise RequestError("both a TEXT and --input were given: give one of them.")
    if args.text.count(STDIN) > 1:
        raise RequestError("- was given several times, and stdin can be read once: give it once.")
    texts = _read(args)
    llm, _ = load_llm(args)
    scores = llm.score(args.prompt, [text for _, text in texts], soft_prompt_of(args))
    for (text_id, text), score in zip(texts, scores, strict=True):
        if args.json:
            head = {"id": text_id, "model": args.model, "dtype": llm.dtype, "text": text}
            emit(json.dumps(head | record_of(score), ensure_ascii=False))
        else:
            print_table(_title(text, score), [("word", "bits", "tokens"), *_rows(score)])


def _read(args: argparse.Namespace) -> list[Text]:
    if args.input is None:
        texts = [text if text != STDIN else read_text("stdin") for text in args.text] or [read_text("stdin")]
        return [*enumerate(texts, 1)]
    lines = read_text(f"--input {args.input}", args.input).splitlines()
    if not args.input.endswith(".jsonl"):
        return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    readers = {number: partial(_record, number, line) for number, line in enumerate(lines, 1) if line.strip()}
    return read_lines(args.input, readers)


def _record(number: int, line: str) -> Text:
    fields = read_object(line.encode())
    if not isinstance(fields.get("text"), str) or type(fields.get("id", number)) not in (int, str):
        raise RequestError('a line is {"text": ...}, and optionally id, a text or a whole number.')
    return fields.get("id", number), fields["text"]


def record_of(score: "ContinuationScore") -> dict[str, Any]:
    """Return a score as JSON. Log probabilities are natural, surprisals are in bits."""
    tokens = zip(score.token_ids, score.tokens, score.logprobs, score.surprisals, strict=True)
    return {
        "logprob": score.cumulative_logprob,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "is_greedy": score.is_greedy,
        "tokens": [dict(zip(("id", "text", "logprob", "surprisal"), row, strict=True)) for row in tokens],
        "words": [word._asdict() | {"surprisal": bits(word.logprob)} for word in score.words],
    }


def _title(text: str, score: "ContinuationScore") -> str:
    shown = text if len(text) <= MAX_TITLE else f"{text[:MAX_TITLE]}..."
    facts = f"{counted(len(score.token_ids), 'token')}, log probability {score.cumulative_logprob:.4f}"
    return f"{shown!r}: {facts}, perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits per byte"


def _rows(score: "ContinuationScore") -> Iterator[tuple[str, str, str]]:
    """Yield each word with its surprisal, and its tokens with theirs if it has several."""
    pairs = iter(zip(score.tokens, score.surprisals, strict=True))
    for word in score.words:
        parts = [
            f"{_shown(text)} {surprisal:.2f}"
            for text, surprisal in (next(pairs) for _ in range(word.num_tokens))
        ]
        yield _shown(word.text), f"{bits(word.logprob):.2f}", " | ".join(parts if len(parts) > 1 else ())


def _shown(text: str) -> str:
    return text.strip() or repr(text)


def _add_lens_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(temperature=0.0)
    parser.add_argument(
        "text",
        nargs="?",
        metavar="TEXT",
        help="the text, in quotation marks; - is stdin (default: all of stdin, as it is)",
    )
    parser.add_argument(
        "--names",
        nargs="?",
        default="resid_post",
        metavar="NAMES",
        help="points that the lens reads, as blocks.0.hook_resid_mid, with *, or short for every layer, separated by "
        "commas; alone, print their names (default: %(default)s)",
    )
    parser.add_argument(
        "--top",
        type=int,
        default=3,
        metavar="N",
        help="most probable tokens of each point (default: %(default)s)",
    )
    page = "write a heat map with the candidates as titles (default: a table)"
    add = parser.add_mutually_exclusive_group().add_argument
    add("--html", metavar="FILE", help=page)
    add("--json", action="store_true", help="print one JSON object (default: a table)")
    add_group(parser, LENS_MODEL)


def _run_lens(args: argparse.Namespace) -> None:
    if args.html is not None:
        if args.names is None:
            raise RequestError("--html is a page of a text: give --names NAMES, or leave it out.")
        check_writable("--html", Path(args.html))
    if args.names is None:
        _print_names(args)
        return
    text = read_text("stdin") if args.text in (None, STDIN) else args.text
    if not text:
        raise RequestError("the TEXT is empty and must have a token.")
    llm, _ = load_llm(args)
    from ..look.html import lens

    try:
        shown = lens(llm, text, args.names.split(","), args.top)
    except RequestError as error:
        raise (error.named("--names") if error.field == "capture" else error) from None
    if args.json:
        print_json({"model": args.model, "dtype": llm.dtype, "text": text, **_lens_record(shown)})
    elif args.html is None:
        print_table(f"{args.model}: the most probable next tokens, by {args.names}", shown.rows())
    else:
        write_results(PAGE + shown._repr_html_(), Path(args.html))
        log(f"{args.html} is written")


def _print_names(args: argparse.Namespace) -> None:
    llm, _ = load_llm(args)
    _, cache = llm.run_with_cache([[0]])
    names = [name for name, array in cache.items() if array.shape[2:] == (llm.config.n_embd,)]
    if args.json:
        print_json({"model": args.model, "names": names})
    else:
        emit("\n".join(names))


def _lens_record(lens: "Lens") -> dict[str, Any]:
    """Return a lens as JSON: lists of names, of tokens, and of candidates by name, token and rank."""
    shown = {name: getattr(lens, name) for name in ("tokens", "surprisals", "names")}
    return shown | {"candidates": lens.texts, "probabilities": lens.probs.tolist()}


SCORE = Command(
    add_arguments,
    run,
    "[flags] [TEXT ...]",
    EVERY_DAY,
)
LENS = Command(
    _add_lens_arguments,
    _run_lens,
    "[flags] [TEXT]",
)
