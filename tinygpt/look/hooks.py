"""The points of a model's step that can be seen or edited, under TransformerLens's names.

A kind of point stands once, or in each layer.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np

from ..errors import RequestError, invalid, suggest
from ..weights.config import ModelConfig
from . import LAST_HIDDEN_STATE, LOGITS, OUTPUTS

# A name with * or a short form, several, a function of a name, or None for all but hook_result.
Names = str | Iterable[str] | Callable[[str], bool] | None

MAX_PATTERNS = 64
MAX_CHARACTERS = 200

# Kinds in the order of a step, and their names.
BEFORE = {"embed": "hook_embed", "pos_embed": "hook_pos_embed"}
IN_LAYER = {
    "resid_pre": "hook_resid_pre",
    "ln1.scale": "ln1.hook_scale",
    "ln1.normalized": "ln1.hook_normalized",
    **{kind: f"attn.hook_{kind}" for kind in ("q", "k", "v", "attn_scores", "pattern", "z", "result")},
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "ln2.scale": "ln2.hook_scale",
    "ln2.normalized": "ln2.hook_normalized",
    "pre": "mlp.hook_pre",
    "post": "mlp.hook_post",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}
AFTER = {"ln_final.scale": "ln_final.hook_scale", "ln_final.normalized": "ln_final.hook_normalized"}
# The kinds that others are computed from.
SOURCES = {
    "embed": (),
    "pos_embed": (),
    **dict.fromkeys(("ln1.scale", "ln1.normalized"), ("resid_pre",)),
    **dict.fromkeys(("attn_scores", "pattern"), ("q", "k")),
    "result": ("z",),
    **dict.fromkeys(("ln2.scale", "ln2.normalized"), ("resid_mid",)),
    **dict.fromkeys(AFTER, ("resid_post",)),
    LAST_HIDDEN_STATE: ("resid_post", LAST_HIDDEN_STATE),
    LOGITS: (LOGITS,),
}


class Looked(Protocol):
    """The model that the cache and the pictures ask."""

    config: ModelConfig
    tokenizer: Any
    read_prompt: Callable[..., Any]
    run_with_cache: Callable[..., tuple[Any, Any]]
    logit_lens: Callable[[Any], np.ndarray]


class HookPoints:
    """A model's points by name: (kind, layer), in the order of a step.

    seen, changed: the kinds that the backend shows and takes back. tensor(name): a parameter of the checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        seen: Iterable[str],
        changed: Iterable[str],
        tensor: Callable[[str], np.ndarray],
        kv_cache_dtype: str,
    ):
        self.config = config
        self.seen = frozenset(seen)
        self.changed = tuple(changed)
        self.tensor = tensor
        self.kv_cache_dtype = kv_cache_dtype
        self.places: dict[str, tuple[str, int]] = {name: (kind, 0) for kind, name in BEFORE.items()}
        for layer in range(config.n_layer):
            self.places |= {f"blocks.{layer}.{name}": (kind, layer) for kind, name in IN_LAYER.items()}
        self.places |= {name: (kind, self.last_layer) for kind, name in AFTER.items()}
        self.places = {name: place for name, place in self.places.items() if self._has(*place)}
        self._aliases = {name: _aliases(name) for name in self.places}
        self.places |= {kind: (kind, self.last_layer) for kind in OUTPUTS}
        self.names = {place: name for name, place in self.places.items()}

    @property
    def last_layer(self) -> int:
        return self.config.n_layer - 1

    def find(self, names: Names, field: str) -> list[str]:
        """Return names: of a list with * and short forms such as "z", of a function, or all but hook_result.

        A short form is every layer's. Raise RequestError for an unknown name.
        """
        if names is None:
            return [name for name in self._aliases if self.places[name][0] != "result"]
        if callable(names):
            return [name for name in self._aliases if names(name)]
        chosen = set()
        num_patterns = 0
        for pattern in [names] if isinstance(names, str) or not isinstance(names, Iterable) else names:
            if not isinstance(pattern, str):
                raise invalid(field, names, "None, a name, a list of names or a function of a name")
            if pattern in self.places:  # a hundred times as fast
                chosen.add(pattern)
                continue
            num_patterns += 1
            if num_patterns > MAX_PATTERNS or len(pattern) > MAX_CHARACTERS:
                limits = (
                    f"at most {MAX_PATTERNS} short forms and names with *, of {MAX_CHARACTERS} characters"
                )
                raise RequestError(f"may have {limits} each.", field)
            matching = [
                name for name, of in self._aliases.items() if any(fnmatchcase(one, pattern) for one in of)
            ]
            if not matching:
                every = sorted(set().union(*self._aliases.values()))
                hint = (
                    suggest(pattern, every)
                    or ': names are as "blocks.0.hook_resid_pre", or "z" for every layer'
                )
                raise RequestError(
                    f"has no point {pattern!r} in this model{hint}.".replace("?.", "?"), field, pattern
                )
            chosen.update(matching)
        return [name for name in self.places if name in chosen]

    def sources(self, name: str) -> list[tuple[str, int]]:
        """Return the places that a point is computed from, or its own if the backend shows it."""
        kind, layer = self.places[name]
        return (
            [(kind, layer)]
            if kind in self.seen
            else [(source, layer) for source in SOURCES.get(kind, (kind,))]
        )

    def shape(self, kind: str, length: int) -> tuple[int, ...]:
        """Return the shape of one position's values, in a text of this length."""
        c = self.config
        of_kind = {
            **dict.fromkeys(("q", "k", "v", "z"), (c.n_head, c.head_size)),
            **dict.fromkeys(("attn_scores", "pattern"), (c.n_head, length)),
            **dict.fromkeys(("pre", "post"), (c.inner_size,)),
            "result": (c.n_head, c.n_embd),
        }
        if kind == LOGITS:
            return (c.vocab_size,)
        return of_kind.get(kind, (1,) if kind.endswith(".scale") else (c.n_embd,))

    def num_bytes(self, name: str, length: int) -> int:
        return 4 * length * int(np.prod(self.shape(self.places[name][0], length)))

    def _has(self, kind: str, layer: int) -> bool:
        config = self.config
        if kind in ("embed", "pos_embed") and (config.embed_norm or config.embed_dim is not None):
            return False
        if config.norm_placement == "post" and (kind.startswith("ln") or kind in ("attn_out", "mlp_out")):
            return False
        if layer in config.expert_layers and kind in ("pre", "post", "mlp_out"):
            return False
        if kind in SOURCES and kind not in self.seen and not self.seen.issuperset(SOURCES[kind]):
            return False
        if (kind == "pos_embed" and config.has_alibi) or (
            kind.startswith("ln_final") and not config.final_norm
        ):
            return False
        return kind in SOURCES or kind in self.seen


def _aliases(name: str) -> set[str]:
    """Return a name and its short forms: blocks.3.attn.hook_z, attn.hook_z, attn.z, hook_z, z."""
    in_layer = name.split(".", 2)[2] if name.startswith("blocks.") else name
    last = in_layer.rpartition(".")[2]
    return {name, in_layer, last, in_layer.replace("hook_", ""), last.replace("hook_", "")}
