"""Captures: the activations and edits of a request and of a step, by name, with TransformerLens's methods."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ..engine.part import Part
from ..errors import RequestError
from ..kernels import numbers
from ..kernels.backend import SCORES, Batch
from . import LAST_HIDDEN_STATE, LOGITS, OUTPUTS
from .edits import Edit, PlacedEdit, first_needed_layer, place, salt_of
from .hooks import BEFORE, HookPoints, Looked, Names

Place = tuple[str, int]  # a kind of point and a layer
ALIASES = {"attn": "pattern", "mlp_pre": "pre", "mlp_post": "post", "attn_logits": "attn_scores"}
ENCODE = {"bfloat16": numbers.to_bfloat16, "int8": numbers.to_rows}  # keys, as the KV cache holds them


class Activations(Mapping[str, np.ndarray]):
    """Arrays (T, ...) float32 by TransformerLens's names; scores and patterns are (H, T, T).

    Some are computed when asked for: layer norms' and, off the reference backend, scores and patterns, within 1e-6 of
    the kernels' values; hook_result from the checkpoint's weights in float32.
    """

    def __init__(
        self,
        points: HookPoints,
        names: list[str],
        seen: dict[tuple[str, int], np.ndarray],
        token_ids: list[int],
    ):
        self.points = points
        # Those that were seen: none if max_time was over before a step.
        self._names = [name for name in names if all(source in seen for source in points.sources(name))]
        self._seen = seen
        length = next((len(rows) for rows in seen.values()), len(token_ids))  # fewer if max_time was over
        self.token_ids = token_ids[:length]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Activations({len(self)} names, {len(self.token_ids)} tokens)"

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.points.places or not all(
            place in self._seen for place in self.points.sources(name)
        ):
            raise KeyError(f"{name} was not captured")
        kind, layer = place = self.points.places[name]
        if place not in self._seen:
            return self._computed(kind, layer)
        rows = self._seen[place]
        return rows.swapaxes(0, 1) if kind in ("attn_scores", "pattern") else rows

    def _computed(self, kind: str, layer: int) -> np.ndarray:
        config = self.points.config
        tensor = self.points.tensor
        if kind == "embed":
            return tensor("wte.weight")[self.token_ids] * np.float32(config.embed_scale)
        if kind == "pos_embed":
            return tensor("wpe.weight")[: len(self.token_ids)].copy()
        ((source, _), *_) = sources = self.points.sources(self.points.names[kind, layer])
        if kind == "result":
            z = self._seen[source, layer]
            w = tensor(f"h.{layer}.attn.c_proj.weight")  # (C, H D)
            return np.einsum("thd,chd->thc", z, w.reshape(len(w), *z.shape[1:]), optimize=True)
        if kind in ("attn_scores", "pattern"):
            q, k = (self._seen[place] for place in sources)  # (T, H, D)
            keys = ENCODE.get(self.points.kv_cache_dtype, np.asarray)(k.swapaxes(0, 1))
            scores = numbers.attention_scores(q, keys, config.attention(layer))
            return scores if kind == "attn_scores" else numbers.softmax(scores)
        x = self._seen[source, layer].astype(np.float64)
        x -= x.mean(-1, keepdims=True)
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + config.layer_norm_epsilon)
        return np.float32(scale if kind.endswith(".scale") else x / scale)


class ActivationCache(Mapping[str, Any]):
    """Activations of B prompts, as TransformerLens's ActivationCache: (B, T, ...), or lists if lengths differ.

    cache["blocks.0.hook_resid_pre"], cache["resid_pre", 0], cache["resid_pre", -1] and cache["scale", 0, "ln1"] are
    arrays; cache.prompts[i] has one prompt's. The methods are TransformerLens's, for prompts of equal length and a
    model with its layer norms folded in: the weight of ln_f is part of a token's direction. pos_slice is a position or
    a slice.
    """

    def __init__(self, prompts: list[Activations], llm: Looked):
        self.prompts, self._llm = prompts, llm
        self._points = prompts[0].points

    def __iter__(self) -> Iterator[str]:
        return iter(self.prompts[0])

    def __len__(self) -> int:
        return len(self.prompts[0])

    def __repr__(self) -> str:
        return f"ActivationCache({len(self)} names, {len(self.prompts)} prompts)"

    def __getitem__(self, key: "str | tuple") -> Any:
        return stacked([activations[self._name(key)] for activations in self.prompts])

    def _name(self, key: "str | tuple") -> str:
        if isinstance(key, str):
            return key if key in self._points.places else f"hook_{key}"
        kind, layer, *of = key
        layer = range(self._points.config.n_layer)[layer]
        kinds = [ALIASES.get(kind, kind), *(f"{sublayer}.{kind}" for sublayer in of)]
        return next(
            (self._points.names[kind, layer] for kind in kinds if (kind, layer) in self._points.names),
            str(key),
        )

    def stack_activation(
        self, activation_name: str, layer: int | None = None, sublayer_type: str | None = None
    ) -> Any:
        """Return (layers, B, T, ...), of the layers before `layer`."""
        return np.stack([self[activation_name, i, sublayer_type] for i in range(self._stop(layer))])

    def accumulated_resid(self, layer: int | None = None, incl_mid: bool = False, **how: Any) -> Any:
        """Return the stream before each layer up to `layer`, or after all (components, B, T, C). how: `_stack`'s."""
        stop = self._stop(layer)
        num_layers = self._points.config.n_layer
        parts = {}
        for i in range(stop + 1):
            if i < num_layers:
                parts[f"{i}_pre"] = self["resid_pre", i]
            else:
                parts["final_post"] = self["resid_post", i - 1]
            takes_mid = incl_mid if i < stop else how.get("mlp_input")
            if takes_mid:
                parts[f"{i}_mid"] = self["resid_mid", i]
        return self._stack(stop, parts, **how)

    def decompose_resid(
        self, layer: int | None = None, mode: str = "all", incl_embeds: bool = True, **how: Any
    ) -> Any:
        """Return the summands of the stream before `layer` (components, B, T, C). mode: "all", "attn" or "mlp"."""
        stop = self._stop(layer)
        kinds = [k for k in ("attn_out", "mlp_out") if mode == "all" or k.startswith(mode)]
        names = [f"hook_{kind}" for kind in BEFORE if incl_embeds]
        parts = {name.removeprefix("hook_"): self[name] for name in names if name in self._points.places}
        parts |= {f"{i}_{kind}": self[kind, i] for i in range(stop) for kind in kinds}
        if how.get("mlp_input") and "attn_out" in kinds:
            parts[f"{stop}_attn_out"] = self["attn_out", stop]
        return self._stack(stop, parts, **how)

    def stack_head_results(self, layer: int | None = None, incl_remainder: bool = False, **how: Any) -> Any:
        """Return what each head before `layer` adds to the stream (heads, B, T, C), and what is left of the stream."""
        stop = self._stop(layer)
        heads = range(self._points.config.n_head)
        parts = {f"L{i}H{h}": self["result", i][..., h, :] for i in range(stop) for h in heads}
        if incl_remainder:
            parts["remainder"] = self["resid_post", stop - 1] - sum(parts.values())
        return self._stack(stop, parts, **how)

    def apply_ln_to_stack(
        self,
        residual_stack: np.ndarray,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
    ) -> np.ndarray:
        """Centre parts of the stream (components, B, T, C), and divide by the scale of the norm that reads it."""
        stop = self._stop(layer)
        of = ("scale", stop, "ln2" if mlp_input else "ln1")
        scale = self["ln_final.hook_scale" if stop == self._points.config.n_layer else of]  # (B, T, 1)
        return (residual_stack - residual_stack.mean(-1, keepdims=True)) / _positions(scale, pos_slice)

    def logit_attrs(
        self, residual_stack: np.ndarray, tokens: Any, incorrect_tokens: Any = None, pos_slice: Any = None
    ) -> np.ndarray:
        """Return what parts of the last stream (components, B, T, C) add to a token's logit (components, B, T).

        tokens: an id, a text of one token, or ids (B,) or (B, T). incorrect_tokens: whose logit is taken off.
        The parts of the whole stream sum to the logit less ln_f's bias on the token's direction.
        """
        directions = self._directions(tokens)
        if incorrect_tokens is not None:
            directions = directions - self._directions(incorrect_tokens)
        return (self.apply_ln_to_stack(residual_stack, None, pos_slice=pos_slice) * directions).sum(-1)

    def logit_lens(self) -> Any:
        """Return the logits that the head makes of each stream of accumulated_resid (L + 1, B, T, V)."""
        return self._llm.logit_lens(self.accumulated_resid())

    def _stop(self, layer: int | None) -> int:
        return self._points.config.n_layer if layer in (None, -1) else layer

    def _stack(
        self,
        stop: int,
        parts: dict[str, np.ndarray],
        apply_ln: bool = False,
        mlp_input: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
    ) -> Any:
        """apply_ln: see `apply_ln_to_stack`, of the norm before layer `stop`, or with mlp_input before its MLP."""
        stack = np.stack([*parts.values()])
        stack = _positions(self.apply_ln_to_stack(stack, stop, mlp_input) if apply_ln else stack, pos_slice)
        return (stack, [*parts]) if return_labels else stack

    def _directions(self, tokens: Any) -> np.ndarray:
        """Return ln_f's weight times rows of the head (..., C)."""
        if isinstance(tokens, str):
            (tokens,) = self._llm.read_prompt(tokens).token_ids
        ids = np.asarray(tokens)
        rows = self._points.tensor("lm_head.weight")[ids] * self._points.tensor("ln_f.weight")
        return rows[:, None] if ids.ndim == 1 else rows  # (B, 1, C)


def stacked(arrays: list[np.ndarray]) -> Any:
    """Stack arrays of equal shape (B, ...), without a copy if there is one; keep others."""
    if len(arrays) == 1:
        return arrays[0][None]
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays


def _positions(array: np.ndarray, pos_slice: Any) -> np.ndarray:
    return array if pos_slice is None else array[..., pos_slice, :]


@dataclass(eq=False)
class Captures(Part):
    """The captures of one sequence, by name, and its edits. rows: (n, ...) of the places that captures need."""

    turn = 1  # its look has the rows of a step with all drafts
    points: HookPoints | None = None
    names: Sequence[str] = ()
    edits: Mapping[Place, list[PlacedEdit]] = field(default_factory=dict)
    first_edit: int = 0  # the first position that an edit changes
    salt: int = 0  # of equal edits
    begin: tuple[int, int] = (0, 0)  # a layer whose input edits set, and from which position on
    sources: frozenset[Place] = frozenset()
    rows: dict[Place, list[np.ndarray]] = field(default_factory=dict)
    _activations: Activations | None = None

    @classmethod
    def of(
        cls, capture: Names, edits: Iterable[Edit], points: HookPoints, num_prompt: int, length: int
    ) -> "Captures":
        """Read captures and edits for a prompt in a text of at most `length`. Raise RequestError."""
        names = points.find(capture, "capture")
        edits = tuple(edits)
        placed = place(edits, points, num_prompt, length)
        needs_all = names or any(edit.function is not None for edit in edits)  # functions see real rows
        begin = (0, 0) if needs_all else first_needed_layer(placed, length)
        return cls(
            points,
            names,
            placed,
            first_edit=min((edit.first for edit in chain(*placed.values())), default=length),
            salt=salt_of(edits, num_prompt, begin),  # the layers before `begin` write no keys
            begin=begin,
            sources=frozenset(source for name in names for source in points.sources(name)),
        )

    @property
    def can_pause(self) -> bool:
        """False if a function of an edit may count its calls."""
        return all(placed.edit.function is None for placed in chain(*self.edits.values()))

    @property
    def max_prefix_tokens(self) -> int | float:
        return 0 if self.names or self.sources else math.inf

    def add_logits(self) -> None:
        """Capture the logits, too, without a name among the activations."""
        self.sources |= {(LOGITS, self.points.last_layer)}

    def acts_on_next(self, sequence: Any) -> bool:
        return True

    def first_layer(self, position: int) -> int:
        layer, start = self.begin
        return layer if position >= start else 0

    def num_logits(self, start: int, stop: int) -> int:
        return stop - start if self._wants(LOGITS) else 0

    def max_count(self, start: int, room: int) -> int | float:
        _, begin = self.begin
        most = (
            begin - start if start < begin else math.inf
        )  # else the cut would decide which layers edits reach
        return min(most, room) if self._wants(LOGITS) else most

    def restart(self) -> None:
        self.rows.clear()
        self._activations = None

    def sample_fields(self, sequence: Any) -> dict[str, Any]:
        if not (self.names or self.sources):  # edits alone
            return {}
        token_ids = sequence.context_token_ids
        return {"activations": self.activations(token_ids[:-1] if sequence.new_token_ids else token_ids)}

    @classmethod
    def before(cls, step: Any, parts: "dict[int, Captures]") -> None:
        look = StepCaptures(step.batch, parts, step.chunks[0].sequence.first_layer)
        step.look = look if look.points else None

    @classmethod
    def after(cls, step: Any, parts: "dict[int, Captures]", logits: Any) -> None:
        failed = {} if step.look is None else step.look.failed
        for i, captures in parts.items():
            chunk = step.chunks[i]
            if i in failed:
                chunk.sequence.error = failed[i]
                continue
            if captures._wants(LOGITS):
                captures._keep(LOGITS, logits[step.rows_of(i, chunk.count)].copy())
            if captures._wants(LAST_HIDDEN_STATE):
                stream = captures.rows["resid_post", captures.points.last_layer][-1]  # (n, C)
                captures._keep(LAST_HIDDEN_STATE, np.float32(step.runner.final_norm(stream)))

    def _wants(self, kind: str) -> bool:
        return self.points is not None and (kind, self.points.last_layer) in self.sources

    def _keep(self, kind: str, rows: np.ndarray) -> None:
        self.rows.setdefault((kind, self.points.last_layer), []).append(rows)

    def num_bytes(self, length: int) -> int:
        return sum(self.points.num_bytes(name, length) for name in self.names)

    def of_sample(self, index: int) -> "Captures":
        return replace(self, rows={})

    def record(self, where: Place, rows: np.ndarray, start: int) -> None:
        """Edit rows (n, ...), of positions from `start` on, and capture them."""
        for edit in self.edits.get(where, ()):
            edit.apply(rows, start)
        if where in self.sources:
            self.rows.setdefault(where, []).append(rows.astype(np.float32))  # a copy

    def prefix_ids(self, token_ids: list[int]) -> list[int]:
        """Return the ids by which the prefix cache compares tokens: from the first edit on, those of equal edits."""
        first, salt = self.first_edit, self.salt
        return token_ids[:first] + [salt + token_id for token_id in token_ids[first:]]

    def activations(self, token_ids: list[int]) -> Activations:
        """Return the activations of a finished sequence, in place of its rows."""
        if self._activations is None:
            joined = {where: _joined(where[0], parts) for where, parts in self.rows.items()}
            self.rows.clear()
            self._activations = Activations(self.points, self.names, joined, token_ids)
        return self._activations


def check_size(captures: Captures, length: int, count: int, limit: int) -> None:
    """Raise RequestError if `count` texts of this length capture more than `limit` bytes."""
    total = count * captures.num_bytes(length)
    if total > limit:
        size_of = partial(captures.points.num_bytes, length=length)
        largest = sorted(captures.names, key=size_of, reverse=True)[:3]
        raise RequestError(
            f"takes {total / 2**20:,.1f} MiB for {count} x {length} positions, and max_capture_bytes is "
            f"{limit / 2**20:,.1f} MiB: ask for fewer names (the largest are {', '.join(largest)}) or raise it.",
            "capture",
        )


class StepCaptures:
    """The Hooks (kernels/backend.py) of a step, for its sequences by their rows."""

    def __init__(self, batch: Batch, captures: dict[int, Captures], first: int = 0):
        """captures: by the number of a sequence in the batch."""
        self.first, self.failed = first, {}  # the error of a sequence's function, by number
        rows = {s: slice(*batch.seq_starts[s : s + 2]) for s in captures}
        self._captures = [(s, one, rows[s], batch.positions[rows[s].start]) for s, one in captures.items()]
        wanted = {where for one in captures.values() for where in (*one.sources, *one.edits)}
        self.points = {(kind, layer) for kind, layer in wanted if kind not in OUTPUTS}
        self.changes = any(one.edits for one in captures.values())
        self._slots = batch.slots

    def __call__(self, kind: str, layer: int, array: np.ndarray, sequence: int | None = None) -> None:
        if (kind, layer) not in self.points:
            return
        for s, captures, rows, start in self._captures:
            if s in self.failed or sequence not in (None, s):
                continue
            try:
                captures.record((kind, layer), array if kind in SCORES else array[rows], start)
            except BaseException as error:  # a user's: the step's other sequences go on
                self.failed[s] = f"an edit at {kind} of layer {layer} failed: {error!r}."

    def check(self, read_positions: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]) -> None:
        """Fail each sequence whose edits left keys or values in the KV cache that are not finite.

        In attention, 0 times infinity is NaN: they would reach earlier positions of the step, and with these the prefix
        cache. Without edits, such positions make all later logits NaN, and nothing of the request is shared.
        Of several positions, the prefill's chunks decide which is named: this NaN hides an earlier position's own.
        """
        for s, captures, rows, start in self._captures:
            if not captures.edits or s in self.failed:
                continue
            kept = read_positions(self._slots[s], start, start + rows.stop - rows.start)
            values = [numbers.from_cache(rows[self.first :]) for rows in kept]  # (layers, H, n, D)
            is_finite = np.logical_and(*(np.isfinite(x).all((1, 3)) for x in values))  # (layers, n)
            if not is_finite.all():
                layer, place = np.argwhere(~is_finite)[0]
                where = f"position {start + place} in layer {self.first + layer}"
                self.failed[s] = f"its edits left {where} with keys or values that are not finite numbers."


def _joined(kind: str, parts: list[np.ndarray]) -> np.ndarray:
    if kind not in SCORES or len(parts) == 1:
        return np.concatenate(parts) if len(parts) > 1 else parts[0]
    length = parts[-1].shape[-1]
    fill = 0.0 if kind == "pattern" else -np.inf
    padded = [np.pad(p, ((0, 0), (0, 0), (0, length - p.shape[-1])), constant_values=fill) for p in parts]
    return np.concatenate(padded)
