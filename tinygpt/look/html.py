"""Texts by surprisal, the logit lens and attention, for terminals and notebooks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError, invalid
from ..kernels import numbers
from . import bits

if TYPE_CHECKING:
    from ..engine.prompts import PromptType
    from ..text.tokenizer import Tokenizer
    from .edits import EditsType
    from .hooks import Looked, Names

SHADES = 8  # of attention: cells of a shade are one SVG path
NUM_KEYS = 3  # that a query's title names
STYLE = (
    "border-collapse: collapse; white-space: pre; font: 12px ui-monospace, monospace",
    "border: 1px solid #8884; padding: 1px 5px; text-align: left",
)
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
    rgb = None if token_id is None else color(bits(logprobs[token_id]))
    if not core or rgb is None:
        return text
    return text.replace(core, f"\x1b[38;2;{';'.join(map(str, rgb))}m{core}\x1b[39m")


def boxes(prompt: str, samples: Sequence[str]) -> str:
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
    for token_id, piece, candidates in zip(
        token_ids, tokenizer.pieces(token_ids, text), logprobs, strict=True
    ):
        if candidates is None:
            shown.append(escape(piece))
            continue
        rows = [f"{math.exp(value):7.2%} {tokenizer.decode([i])!r}" for i, value in candidates.items()]
        surprisal = bits(candidates[token_id])
        title = escape("\n".join([f"{surprisal:.1f} bits", *rows]))
        shown.append(
            f'<span class="token" style="--bits: {min(surprisal, MAX_BITS):.2f}" title="{title}">{escape(piece)}</span>'
        )
    return "".join(shown)


@dataclass(frozen=True, eq=False)
class Lens:
    """What each stream (K of them) would make the model say after each token (T): the `top` most probable tokens."""

    tokens: list[str]
    surprisals: list[float]  # bits of tokens[1:], by the last stream
    names: list[str]  # of the streams
    probs: np.ndarray  # (K, T, top)
    texts: list[list[list[str]]]  # (K, T, top)

    def rows(self) -> list[list[str]]:
        """Return a table: a token's candidates are below each other, in a column for each stream."""
        rows = [
            ["token", "bits", *(name.removeprefix("blocks.").replace("hook_", "") for name in self.names)]
        ]
        for t, (token, surprisal) in enumerate(self._positions()):
            for k in range(self.probs.shape[-1]):
                cells = [
                    f"{self.probs[i, t, k]:4.0%} {self.texts[i][t][k]!r}" for i in range(len(self.names))
                ]
                rows.append([*(("", "") if k else (repr(token), surprisal)), *cells])
        return rows

    def _repr_html_(self) -> str:
        head = "".join(f'<th style="{STYLE[1]}">{escape(name)}</th>' for name in ("", "bits", *self.names))
        lines = []
        for t, (token, surprisal) in enumerate(self._positions()):
            cells = "".join(self._cell(i, t) for i in range(len(self.names)))
            rgb = color(self.surprisals[t - 1]) if t else None
            shown = f"{STYLE[1]}; color: rgb{rgb}" if rgb else STYLE[1]
            lines.append(
                f'<tr><th style="{shown}">{escape(repr(token))}</th><td>{surprisal}</td>{cells}</tr>'
            )
        return f'<table style="{STYLE[0]}"><tr>{head}</tr>{"".join(lines)}</table>'

    def _cell(self, i: int, t: int) -> str:
        probs, texts = self.probs[i, t], self.texts[i][t]
        title = "\n".join(f"{prob:7.2%} {text!r}" for prob, text in zip(probs, texts, strict=True))
        style = f"{STYLE[1]}; background: rgba(70, 130, 220, {0.8 * probs[0]:.2f})"
        return f'<td style="{style}" title="{escape(title)}">{escape(repr(texts[0]))}</td>'

    def _positions(self) -> list[tuple[str, str]]:
        return [*zip(self.tokens, ["", *(f"{surprisal:.2f}" for surprisal in self.surprisals)], strict=True)]


@dataclass(frozen=True, eq=False)
class Attention:
    """How much the tokens of a text attend to each, in the heads of a layer: pattern (H, T, T)."""

    tokens: list[str]
    pattern: np.ndarray

    def _repr_html_(self) -> str:
        return f'<div style="{STYLE[0]}">{"".join(map(self._head, range(len(self.pattern))))}</div>'

    def _head(self, head: int) -> str:
        size = len(self.tokens)
        pattern = self.pattern[head]
        shades = np.minimum(pattern * (SHADES + 1), SHADES).astype(int)  # (T, T)
        paths = []
        for shade in range(1, SHADES + 1):
            if cells := "".join(f"M{k} {q}h1v1h-1" for q, k in np.argwhere(shades == shade)):
                paths.append(f'<path d="{cells}" fill="#4682dc" fill-opacity="{shade / SHADES:g}"/>')
        rows = []
        for q, token in enumerate(self.tokens):
            keys = np.argsort(-pattern[q, : q + 1], kind="stable")[:NUM_KEYS]
            title = "\n".join([repr(token), *(f"{pattern[q, k]:7.2%} {self.tokens[k]!r}" for k in keys)])
            rows.append(
                f'<path d="M0 {q}h{size}v1h-{size}" opacity="0"><title>{escape(title)}</title></path>'
            )
        frame = 'style="border: 1px solid #8884; margin: 2px; width: 150px; height: 150px"'
        marks = f"{''.join(paths)}{''.join(rows)}"
        return f'<svg viewBox="0 0 {size} {size}" {frame} aria-label="head {head}">{marks}</svg>'


def lens(
    llm: "Looked", prompt: "PromptType", names: "Names" = "resid_post", top: int = 3, edits: "EditsType" = ()
) -> Lens:
    """Return the logit lens of a text. Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).

    names, edits: as for `LLM.run_with_cache`, of points with n_embd values.
    """
    if not 1 <= top <= llm.config.vocab_size:
        raise RequestError(f"is {top} and must be from 1 to {llm.config.vocab_size}.", "top", top)
    ids = llm.read_prompt(prompt).token_ids
    logits, cache = llm.run_with_cache([ids], names, edits)
    shown = [*cache]
    probs = []
    texts = []
    for name in shown:
        if cache[name].shape[2:] != (llm.config.n_embd,):
            raise RequestError(f"has {name!r}, which is no stream of {llm.config.n_embd} values.", "names")
        best = [_best(row, top) for row in llm.logit_lens(cache[name][0])]
        probs.append([pair[1] for pair in best])
        texts.append([_decoded(llm, pair[0].tolist()) for pair in best])
    pairs = zip(logits[0].astype(np.float64), ids[1:], strict=False)
    last = [numbers.log_softmax(row[None])[0, i].item() for row, i in pairs]
    return Lens(_decoded(llm, ids), [*map(bits, last)], shown, np.array(probs), texts)


def attention(llm: "Looked", prompt: "PromptType", layer: int, edits: "EditsType" = ()) -> Attention:
    """Return the attention patterns of a layer. edits: as for `LLM.run_with_cache`."""
    layers = range(llm.config.n_layer)
    if layer not in range(-len(layers), len(layers)):
        raise invalid("layer", layer, f"from {-len(layers)} to {layers[-1]}")
    layer = layers[layer]
    ids = llm.read_prompt(prompt).token_ids
    _, cache = llm.run_with_cache([ids], f"blocks.{layer}.attn.hook_pattern", edits)
    return Attention(_decoded(llm, ids), cache["pattern", layer][0])


def _best(logits: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and their probabilities, of logits (V,)."""
    ids = np.argpartition(-logits, top - 1)[:top]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return ids, numbers.softmax(logits)[ids]


def _decoded(llm: "Looked", token_ids: list[int]) -> list[str]:
    return [llm.tokenizer.decode([token_id]) for token_id in token_ids]
