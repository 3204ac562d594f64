"""The methods of an LLM that look inside: logits, hidden states, activations, causal traces and control vectors."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.model_runner import ModelRunner, ModelSource
from ..engine.prompts import Prompts, PromptType, prompt_list
from ..errors import FailedRequestError, RequestError, invalid
from ..kernels import numbers
from ..kernels.backend import Batch
from ..llm_args import LOGIT_ROWS, EngineConfig, LLMArgs
from ..sampling_params import SamplingParams
from ..weights.config import ModelConfig

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.input_processor import InputProcessor
    from ..engine.sequence import Request
    from ..outputs import RequestOutput
    from .captures import ActivationCache, Activations, Captures, Place
    from .edits import ControlVector, EditsType
    from .hooks import HookPoints, Names

POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


class Probe:
    """Computes in a slot that steps never use. The engine's thread alone calls the methods."""

    def __init__(self, runner: ModelRunner, engine_config: EngineConfig):
        self._runner = runner
        self._layers = range(runner.config.n_layer)
        self._last = "resid_post", self._layers[-1]
        self._slot = engine_config.num_slots - 1
        self._max_num_tokens = engine_config.max_num_batched_tokens
        self._chunk_size = min(LOGIT_ROWS, engine_config.max_num_batched_tokens, engine_config.max_model_len)

    def logits(self, token_ids: list[int], captures: "Captures | None" = None) -> np.ndarray:
        """Return logits (T, V). captures: of all positions. Raise FailedRequestError if an edit fails."""
        if captures is None:  # copies: the next step overwrites them
            return np.concatenate(
                [self._runner.forward(batch).copy() for batch in self._batches(token_ids, "all")]
            )
        captures.sources |= {self._last}
        for batch in self._batches(token_ids, [0]):
            look = captures.step(batch)
            self._runner.forward(batch, look)
            if look.failed:
                raise FailedRequestError(look.failed[0])
        return self.logits_of(np.concatenate(captures.rows[self._last]))

    def logits_of(self, stream: np.ndarray) -> np.ndarray:
        """Return logits (N, V) of a residual stream (N, C) after the last layer."""
        from .captures import given

        found = np.empty((len(stream), self._runner.config.vocab_size), np.float32)
        for start in range(0, len(stream), self._chunk_size):
            rows = stream[start : start + self._chunk_size]
            batch = Batch.of([[0] * len(rows)], [0], [self._slot], "all")
            found[start : start + len(rows)] = self._runner.forward(
                batch, given(batch, len(self._layers), rows)
            )
        return found

    def hidden_states(self, token_ids: list[int], before_norm: bool) -> np.ndarray:
        """Return (L + 1, T, C)."""
        states = self._captured(token_ids, [*(("resid_pre", layer) for layer in self._layers), self._last])
        if not before_norm:
            states[-1] = self._runner.final_norm(states[-1])
        return np.stack(states, dtype=np.float32, casting="same_kind")

    def last_states(self, token_ids: list[int]) -> np.ndarray:
        """Return (T, C), after ln_f."""
        (stream,) = self._captured(token_ids, [self._last])
        return self._runner.final_norm(stream).astype(np.float32)

    def embedding(self, token_ids: list[int], pooling: str) -> np.ndarray:
        return POOLINGS[pooling](self.last_states(token_ids))

    def attentions(self, token_ids: list[int]) -> np.ndarray:
        """Return (L, H, T, T), of the KV cache's keys."""
        queries = self._captured(token_ids, [("q", layer) for layer in self._layers])  # (T, H, D) each
        keys, _ = self._runner.read_positions(self._slot, 0, len(token_ids))  # (L, H, T, D)
        config = self._runner.config
        maps = np.empty((*keys.shape[:3], len(token_ids)), np.float32)
        for layer in self._layers:
            scores = numbers.attention_scores(queries[layer], keys[layer], config.attention(layer))
            maps[layer] = numbers.softmax(scores)
        return maps

    def _captured(self, token_ids: list[int], places: "list[Place]") -> list[np.ndarray]:
        from .captures import captured

        return captured(self._runner.forward, self._batches(token_ids, [0]), places)

    def _batches(self, token_ids: list[int], logits_of: str | list[int]) -> Iterator[Batch]:
        size = self._chunk_size if logits_of == "all" else self._max_num_tokens
        for first in range(0, len(token_ids), size):
            yield Batch.of([token_ids[first : first + size]], [first], [self._slot], logits_of)


class LookMethods:
    config: ModelConfig
    engine: "Engine"
    _inputs: "InputProcessor"
    _probe: Probe
    _run: "Callable[[list[Request]], Iterable[object]]"
    generate: "Callable[..., list[RequestOutput]]"

    def run_with_cache(
        self, prompts: Prompts, names: "Names" = None, edits: "EditsType" = ()
    ) -> "tuple[Any, ActivationCache]":
        """Return logits (B, T, V) of B prompts and their activations, as TransformerLens does; no BOS is prepended.

        names: of points as "blocks.0.hook_resid_pre", with *, or short as "z" for every layer's; a function of a name;
            None is all but hook_result. edits: an Edit or a list of them, whose effect is seen.
        Prompts of different lengths have lists of arrays, one for each prompt, without padding.
        Raise RequestError, before any work, for an unknown name or more than max_capture_bytes.
        """
        from .captures import ActivationCache, stacked

        logits, found = self._look("activations", _some("prompts", prompts), names, edits)
        return stacked(logits), ActivationCache(found, self)

    def logits(self, token_ids: PromptType, edits: "EditsType" = ()) -> np.ndarray:
        """Return teacher-forced logits (T, V) float32: row t is for the token after token_ids[: t + 1].

        edits: an Edit or a list of them.
        Raise RequestError for an empty list, ids outside the vocabulary or more than max_model_len ids.
        """
        (found,), _ = self._look("logits", [token_ids], (), edits)
        return found

    def hidden_states(self, token_ids: PromptType, before_norm: bool = False) -> np.ndarray:
        """Return (L + 1, T, C) float32: the input of each layer, then the output of ln_f, or before_norm its input.

        Raise as `logits` does.
        """
        token_ids = self._read_ids("hidden states", token_ids)
        return self.engine.call(partial(self._probe.hidden_states, token_ids, before_norm))

    def attentions(self, token_ids: PromptType) -> np.ndarray:
        """Return (L, H, T, T) float32, 4 L H T**2 bytes: how much a position attends to each.

        Raise as `logits` does.
        """
        token_ids = self._read_ids("attentions", token_ids)
        return self.engine.call(partial(self._probe.attentions, token_ids))

    def embed(self, prompts: Prompts, pooling: str = "last") -> np.ndarray:
        """Return (len(prompts), C) float32: a vector of the last hidden states of each prompt.

        prompts: texts or lists of token ids. pooling: "last" token, or "mean" or "sum" over all.
        Raise RequestError, before any work, as `logits` does.
        """
        self.engine.check_open()
        if pooling not in tuple(POOLINGS):
            raise invalid("pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")
        given = [self._read_ids("embeddings", prompt) for prompt in prompt_list(prompts)]
        calls = [partial(self._probe.embedding, ids, pooling) for ids in given]
        vectors = [self.engine.call(call) for call in calls]  # (C,) each
        return np.stack(vectors) if vectors else np.empty((0, self.config.n_embd), np.float32)

    def logit_lens(self, stream: Any) -> np.ndarray:
        """Return logits (..., V) of a residual stream (..., C): ln_f and the head, with the model's own bits."""
        self.engine.check_open()
        stream = np.asarray(stream, np.float32)
        if not stream.size or stream.shape[-1] != self.config.n_embd:
            raise RequestError(f"has shape {stream.shape} and must end in {self.config.n_embd}.", "stream")
        rows = stream.reshape(-1, self.config.n_embd)
        return self.engine.call(partial(self._probe.logits_of, rows)).reshape(*stream.shape[:-1], -1)

    def diff(self, prompt: PromptType, edits: "EditsType", names: "Names" = None) -> dict[str, np.ndarray]:
        """Return masks (T, ...) of the activations in which edits change a bit, by name, in the order of a step.

        names: as for `run_with_cache`. Names without a change are not there.
        """
        plain, edited = (self._look("activations", [prompt], names, some)[1][0] for some in ((), edits))
        masks = {name: plain[name].view(np.int32) != edited[name].view(np.int32) for name in plain}
        return {name: mask for name, mask in masks.items() if mask.any()}

    def causal_trace(
        self,
        clean: PromptType,
        corrupted: PromptType,
        answer: PromptType,
        kind: str = "resid_pre",
        edits: "EditsType" = (),
    ) -> np.ndarray:
        """Return the answer's log probability (L, T) after the corrupted prompt, by the activation that is restored.

        kind: of points, whose value at a layer and position is the clean prompt's: "resid_pre", "attn_out", "z".
        edits: of the corrupted prompt, such as noise. The runs share positions before an edit and, for an answer of one
        token and without functions, layers.
        Source: Meng et al., "Locating and Editing Factual Associations in GPT" (2022).
        """
        from .edits import Edit

        clean_ids, ids, answer_ids = (
            self._read_ids("a trace", prompt) for prompt in (clean, corrupted, answer)
        )
        edits = SamplingParams(edits=edits).edits
        if len(clean_ids) != len(ids):
            reason = (
                f"has {len(ids)} tokens and the clean prompt {len(clean_ids)}: their positions are compared."
            )
            raise RequestError(reason, "corrupted")
        score = partial(self._inputs.scoring_requests, ids, [answer_ids], None, None)
        first = score(edits)
        _ = score(Edit(kind, keep=0))  # refused before any work
        _, (found,) = self._look("activations", [clean_ids], kind, ())
        inputs = [f"blocks.{found.points.places[name][1]}.hook_resid_pre" for name in found]
        _, (before,) = self._look("activations", [ids], inputs, edits)
        requests = []
        for name, stream in zip(found, inputs, strict=True):
            (rows := before[stream]).flags.writeable = False  # edits keep views
            for at in range(len(ids)):
                own = Edit(stream, keep=0, value=rows[at:], at=slice(at, None))
                requests += score((*edits, own, Edit(name, keep=0, value=found[name][at], at=at)))
        for several in (first, requests):  # the first leaves its keys and values to the others
            for _ in self._run(several):
                pass
        found_at = [sum(each.sequences[0].prompt_logprobs.logprobs) for each in requests]
        return np.array(found_at).reshape(len(found), len(ids))

    def control_vector(self, positive: Prompts, negative: Prompts) -> "ControlVector":
        """Return the mean difference of two sets' residual streams at the last token, after layers 1 and later.

        Source: Turner et al., "Steering Language Models With Activation Engineering" (2023).
        """
        from .edits import ControlVector

        names = [f"blocks.{i}.hook_resid_post" for i in range(1, self.config.n_layer)]
        means = []
        for prompts in (_some("positive", positive), _some("negative", negative)):
            outputs = self.generate(prompts, max_tokens=1, capture=names)
            rows = [[output.outputs[0].activations[name][-1] for name in names] for output in outputs]
            means.append(np.mean(rows, axis=0))  # (L - 1, C)
        return ControlVector(dict(enumerate(means[0] - means[1], 1)))

    def _read_ids(self, what: str, token_ids: PromptType) -> list[int]:
        self.engine.check_open()
        return self._inputs.read_ids(what, token_ids)

    def _look(
        self, what: str, prompts: list, names: "Names", edits: "EditsType"
    ) -> "tuple[list[np.ndarray], list[Activations]]":
        """Return logits (T, V) and Activations of each prompt."""
        given = [self._read_ids(what, prompt) for prompt in prompts]
        edits = SamplingParams(edits=edits).edits
        is_plain = what == "logits" and not edits
        sizes = [(len(ids), len(ids), len(given)) for ids in given]
        captures = [None if is_plain else self._inputs.captures(names, edits, *each) for each in sizes]
        logits = [
            self.engine.call(partial(self._probe.logits, *pair)) for pair in zip(given, captures, strict=True)
        ]
        return logits, [one and one.activations(ids) for ids, one in zip(given, captures, strict=True)]


def _some(field: str, prompts: Prompts) -> list:
    if not (found := prompt_list(prompts)):
        raise RequestError("is empty and must have a prompt.", field)
    return found


def points_of(source: ModelSource, args: LLMArgs) -> "Callable[[], HookPoints]":
    """Return a function that makes the points of a loaded model. It keeps no weights: parameters are read anew."""
    backend = source.backend
    config = source.config
    kv_cache_dtype = source.kv_cache_dtype
    opened = cache(lambda: ModelSource.open(replace(args, lora_modules=None)).checkpoint)

    def tensor(name: str) -> np.ndarray:
        checkpoint = opened()
        if checkpoint.converted_to:
            raise RequestError(
                f"{name} is packed in this converted checkpoint: load the one that it was made from."
            )
        return checkpoint.tensor(name)

    @cache
    def points() -> "HookPoints":
        from .hooks import HookPoints

        return HookPoints(config, backend.SEEN, backend.CHANGED, tensor, kv_cache_dtype)

    return points
