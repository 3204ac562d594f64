"""Texts colored by surprisal: for terminals, and for notebooks in the colors of the server's page."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

NAT = 1 / math.log(2)  # bits
MIN_BITS, RED_BITS = 1.0, 8.0  # between them a terminal's colors change
MAX_BITS = 12.5  # the page's
AMBER, RED = (192, 138, 46), (228, 81, 47)  # the page's in its dark scheme, readable on white, too
PAGE = Path(__file__).parents[1] / "server" / "page.html"
SHARED = "/* Notebooks have these lines, too. */"  # of the page's style, up to an empty line


def color(surprisal: float) -> tuple[int, int, int] | None:
    """Return red, green and blue for a surprisal in bits, or None for a token that was expected."""
    if surprisal < MIN_BITS:
        return None
    share = min((surprisal - MIN_BITS) / (RED_BITS - MIN_BITS), 1)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(AMBER, RED, strict=True))
    return red, green, blue


def ansi(text: str, token_id: int | None, logprobs: Mapping[int, float] | None) -> str:
    """Return a token's text in 24-bit color; white space around it stays outside of the escape sequences."""
    core = text.strip()
    rgb = None if token_id is None else color(-NAT * logprobs[token_id])
    if not core or rgb is None:
        return text
    return text.replace(core, f"\x1b[38;2;{';'.join(map(str, rgb))}m{core}\x1b[39m")


def html(prompt: str, samples: Sequence[str]) -> str:
    """Return the marks of each sample after those of the prompt."""
    style = PAGE.read_text(encoding="utf-8").partition(SHARED)[2].partition("\n\n")[0]
    box = '<div class="surprise" style="white-space: pre-wrap; overflow-wrap: anywhere; margin: .5em 0">'
    return f"<style>{style}</style>" + "".join(f"{box}{prompt}{marks}</div>" for marks in samples)


def marks(
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[Mapping[int, float] | None] | None,
    tokenizer: "Tokenizer | None",
) -> str:
    """Return a text whose tokens have colors and their candidates as titles, if they have log probabilities."""
    if logprobs is None or tokenizer is None or len(logprobs) != len(token_ids):
        return escape(text)
    shown = []
    for token_id, piece, found in zip(token_ids, tokenizer.pieces(token_ids, text), logprobs, strict=True):
        if found is None:
            shown.append(escape(piece))
            continue
        rows = [f"{math.exp(value):7.2%} {tokenizer.decode([i])!r}" for i, value in found.items()]
        surprisal = -NAT * found[token_id]
        title = escape("\n".join([f"{surprisal:.1f} bits", *rows]))
        shown.append(
            f'<span class="token" style="--bits: {min(surprisal, MAX_BITS):.2f}" title="{title}">{escape(piece)}</span>'
        )
    return "".join(shown)
