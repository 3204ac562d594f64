"""`tinygpt lens`: what each layer of a model would say after each token of a text."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .flags import Command, add_group
from .loading import load_llm
from .streams import STDIN, check_writable, log, print_json, print_table, read_text, write_results

if TYPE_CHECKING:
    from ..look.html import Lens

MODEL = ("model", "dtype", "threads", "device", "lora", "revision", "split_special_tokens")
DEFAULT_NAMES = "resid_post"
PAGE = '<!doctype html><meta charset="utf-8"><title>logit lens</title>'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(temperature=0.0)  # nothing is drawn
    about = "the text, in quotation marks; - is stdin (default: all of stdin, as it is)"
    parser.add_argument("text", nargs="?", metavar="TEXT", help=about)
    about = (
        "points that the lens reads, as blocks.0.hook_resid_mid, with *, or short for every layer, separated by "
        "commas (default: %(default)s)"
    )
    parser.add_argument("--names", default=DEFAULT_NAMES, metavar="NAMES", help=about)
    about = "most probable tokens of each point (default: %(default)s)"
    parser.add_argument("--top", type=int, default=3, metavar="N", help=about)
    about = "write a heat map with the candidates as titles (default: a table)"
    add = parser.add_mutually_exclusive_group().add_argument
    add("--html", metavar="FILE", help=about)
    add("--json", action="store_true", help="print one JSON object (default: a table)")
    add_group(parser, MODEL)


def run(args: argparse.Namespace) -> None:
    if args.html is not None:
        check_writable("--html", Path(args.html))
    text = read_text("stdin") if args.text in (None, STDIN) else args.text
    if not text:
        raise RequestError("the TEXT is empty and must have a token.")
    llm, _ = load_llm(args)
    from ..look.html import lens

    try:
        found = lens(llm, text, args.names.split(","), args.top)
    except RequestError as error:
        raise (error.named("--names") if error.field == "capture" else error) from None
    if args.json:
        print_json({"model": args.model, "dtype": llm.dtype, "text": text, **record_of(found)})
    elif args.html is None:
        print_table(f"{args.model}: the most probable next tokens, by {args.names}", found.rows())
    else:
        write_results(PAGE + found._repr_html_(), Path(args.html))
        log(f"{args.html} is written")


def record_of(lens: "Lens") -> dict[str, Any]:
    """Return a lens as JSON: lists of names, of tokens, and of candidates by name, token and rank."""
    shown = {name: getattr(lens, name) for name in ("tokens", "surprisals", "names")}
    return shown | {"candidates": lens.texts, "probabilities": lens.probs.tolist()}


LENS = Command(
    "show what each layer of a model would say after each token", add_arguments, run, "[flags] [TEXT]"
)
