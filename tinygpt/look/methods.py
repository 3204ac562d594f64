"""The methods of an LLM that look inside: logits, hidden states, activations, causal traces and control vectors."""

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.model_runner import check_pooling
from ..engine.model_source import ModelSource
from ..engine.prompts import Prompts, PromptType, prompt_list
from ..errors import RequestError
from ..llm_args import LLMArgs
from ..sampling_params import SamplingParams
from ..weights.convert.packed import PackedCheckpoint

if TYPE_CHECKING:
    from .cache import ActivationCache
    from .edits import ControlVector
    from .hooks import HookPoints


class LookMethods:
    config: Any
    engine: Any
    _inputs: Any
    _probe: Any
    _run: Any
    generate: Any

    def run_with_cache(
        self, prompts: Prompts, names: Any = None, edits: Any = ()
    ) -> "tuple[Any, ActivationCache]":
        """Return logits (B, T, V) of B prompts and their activations, as TransformerLens does; no BOS is prepended.

        names: of points as "blocks.0.hook_resid_pre", with *, or short as "z" for every layer's; a function of a name;
            None is all but hook_result. edits: an Edit or a list of them, whose effect is seen.
        Prompts of different lengths have lists of arrays, one for each prompt, without padding.
        Raise RequestError, before any work, for an unknown name or more than max_capture_bytes.
        """
        from .cache import ActivationCache, stacked

        logits, found = self._look("activations", _some("prompts", prompts), names, edits)
        return stacked(logits), ActivationCache(found, self)

    def logits(self, token_ids: PromptType, edits: Any = ()) -> np.ndarray:
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
        layers = [*range(self.config.n_layer), -2 if before_norm else -1]
        return self.engine.call(partial(self._probe.hidden_states, token_ids, layers))

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
        check_pooling(pooling)
        given = [self._read_ids("embeddings", prompt) for prompt in prompt_list(prompts)]
        vectors = [
            self.engine.call(partial(self._probe.embedding, ids, pooling)) for ids in given
        ]  # (C,) each
        return np.stack(vectors) if vectors else np.empty((0, self.config.n_embd), np.float32)

    def logit_lens(self, stream: Any) -> np.ndarray:
        """Return logits (..., V) of a residual stream (..., C): ln_f and the head, with the model's own bits."""
        self.engine.check_open()
        stream = np.asarray(stream, np.float32)
        if not stream.size or stream.shape[-1] != self.config.n_embd:
            raise RequestError(f"has shape {stream.shape} and must end in {self.config.n_embd}.", "stream")
        rows = stream.reshape(-1, self.config.n_embd)
        return self.engine.call(partial(self._probe.logits_of, rows)).reshape(*stream.shape[:-1], -1)

    def diff(self, prompt: PromptType, edits: Any, names: Any = None) -> dict[str, np.ndarray]:
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
        edits: Any = (),
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

    def _look(self, what: str, prompts: list, names: Any, edits: Any) -> tuple[list[np.ndarray], list[Any]]:
        """Return logits (T, V) and Activations of each prompt."""
        given = [self._read_ids(what, prompt) for prompt in prompts]
        edits = SamplingParams(edits=edits).edits
        is_plain = what == "logits" and not edits
        sizes = [(len(ids), len(ids), len(given)) for ids in given]
        looks = [None if is_plain else self._inputs.looks(names, edits, *each) for each in sizes]
        logits = [
            self.engine.call(partial(self._probe.logits, *pair)) for pair in zip(given, looks, strict=True)
        ]
        return logits, [one and one.activations(ids) for ids, one in zip(given, looks, strict=True)]


def _some(field: str, prompts: Prompts) -> list:
    if not (found := prompt_list(prompts)):
        raise RequestError("is empty and must have a prompt.", field)
    return found


def points_of(source: ModelSource, args: LLMArgs) -> "HookPoints":
    """Return the points of a loaded model. The engine keeps packed weights alone: parameters are read anew."""
    from .hooks import HookPoints

    merged = replace(args, lora_modules=None)
    opened = cache(lambda: ModelSource.open(merged).checkpoint)

    def tensor(name: str) -> np.ndarray:
        checkpoint = opened()
        if isinstance(checkpoint, PackedCheckpoint):
            raise RequestError(
                f"{name} is packed in this converted checkpoint: load the one that it was made from."
            )
        return checkpoint.tensor(name)

    backend = source.backend
    return HookPoints(source.config, backend.SEEN, backend.CHANGED, tensor, source.kv_cache_dtype)
