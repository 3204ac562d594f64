"""The methods of an LLM that look inside: logits, hidden states, activations, causal traces and control vectors."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.model_runner import ModelSource
from ..engine.prompts import Prompts, PromptType, prompt_list
from ..errors import RequestError, invalid
from ..llm_args import LLMArgs
from ..sampling_params import SamplingParams
from ..weights.checkpoint import Checkpoint
from ..weights.config import ModelConfig
from . import LAST_HIDDEN_STATE, LOGITS

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.input_processor import InputProcessor
    from ..engine.sequence import Request
    from ..outputs import RequestOutput
    from .captures import ActivationCache, Activations, Captures
    from .edits import ControlVector, EditsType
    from .hooks import HookPoints, Names

POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


class LookMethods:
    config: ModelConfig
    engine: "Engine"
    _inputs: "InputProcessor"
    _results: "Callable[[list[Request]], list]"
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

        activations = self._look("activations", _some("prompts", prompts), names, edits)
        return stacked([one[LOGITS] for one in activations]), ActivationCache(activations, self)

    def logits(self, token_ids: PromptType, edits: "EditsType" = ()) -> np.ndarray:
        """Return teacher-forced logits (T, V) float32: row t is for the token after token_ids[: t + 1].

        edits: an Edit or a list of them.
        Raise RequestError for an empty list, ids outside the vocabulary or more than max_model_len ids.
        """
        if SamplingParams(edits=edits).edits:
            (activations,) = self._look("logits", [token_ids], (), edits)
        else:
            (activations,) = self._results(self._reading_requests("logits", [token_ids], LOGITS))
        return activations[LOGITS]

    def hidden_states(self, token_ids: PromptType, before_norm: bool = False) -> np.ndarray:
        """Return (L + 1, T, C) float32: the input of each layer, then the output of ln_f, or before_norm its input.

        Raise as `logits` does.
        """
        layers = range(self.config.n_layer)
        last = f"blocks.{layers[-1]}.hook_resid_post" if before_norm else LAST_HIDDEN_STATE
        names = [*(f"blocks.{layer}.hook_resid_pre" for layer in layers), last]
        (activations,) = self._results(self._reading_requests("hidden states", [token_ids], names))
        return np.stack([activations[name] for name in names])

    def attentions(self, token_ids: PromptType) -> np.ndarray:
        """Return (L, H, T, T) float32, 4 L H T**2 bytes: how much a position attends to each.

        Raise as `logits` does.
        """
        (activations,) = self._results(self._reading_requests("attentions", [token_ids], "pattern"))
        return np.stack([*activations.values()], dtype=np.float32)

    def embed(self, prompts: Prompts, pooling: str = "last") -> np.ndarray:
        """Return (len(prompts), C) float32: a vector of the last hidden states of each prompt.

        prompts: texts or lists of token ids. pooling: "last" token, or "mean" or "sum" over all.
        Raise RequestError, before any work, as `logits` does.
        """
        vectors = self._results(self._embedding_requests(prompts, pooling))  # (C,) each
        return np.stack(vectors) if vectors else np.empty((0, self.config.n_embd), np.float32)

    def logit_lens(self, stream: Any) -> np.ndarray:
        """Return logits (..., V) of a residual stream (..., C): ln_f and the head, with the model's own bits."""
        self.engine.check_open()
        try:
            stream = np.asarray(stream, np.float32)
        except (TypeError, ValueError):
            raise invalid("stream", stream, f"numbers (..., {self.config.n_embd})") from None
        if not stream.size or stream.shape[-1] != self.config.n_embd:
            raise RequestError(f"has shape {stream.shape} and must end in {self.config.n_embd}.", "stream")
        rows = stream.reshape(-1, self.config.n_embd)
        return self.engine.call(partial(self.engine.runner.head, rows)).reshape(*stream.shape[:-1], -1)

    def diff(self, prompt: PromptType, edits: "EditsType", names: "Names" = None) -> dict[str, np.ndarray]:
        """Return masks (T, ...) of the activations in which edits change a bit, by name, in the order of a step.

        names: as for `run_with_cache`. Names without a change are not there.
        """
        plain, edited = (self._look("activations", [prompt], names, some)[0] for some in ((), edits))
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

        self.engine.check_open()
        clean_ids, ids, answer_ids = (
            self._inputs.read_ids("a trace", prompt) for prompt in (clean, corrupted, answer)
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
        (restored,) = self._look("activations", [clean_ids], kind, ())
        inputs = [f"blocks.{restored.points.places[name][1]}.hook_resid_pre" for name in restored]
        (before,) = self._look("activations", [ids], inputs, edits)
        requests = []
        for name, stream in zip(restored, inputs, strict=True):
            (rows := before[stream]).flags.writeable = False  # edits keep views
            for at in range(len(ids)):
                own = Edit(stream, keep=0, value=rows[at:], at=slice(at, None))
                requests += score((*edits, own, Edit(name, keep=0, value=restored[name][at], at=at)))
        _ = self._results(first)  # it leaves its keys and values to the others
        logprobs = [score.cumulative_logprob for score in self._results(requests)]
        return np.array(logprobs).reshape(len(restored), len(ids))

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

    def _embedding_requests(self, prompts: Prompts, pooling: str) -> "list[Request]":
        """Return a request for the vector (C,) of each prompt. Raise RequestError."""
        self.engine.check_open()
        if pooling not in tuple(POOLINGS):
            raise invalid("pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")
        pool = POOLINGS[pooling]
        return self._reading_requests(
            "embeddings",
            prompt_list(prompts),
            LAST_HIDDEN_STATE,
            lambda activations: pool(activations[LAST_HIDDEN_STATE]),
        )

    def _reading_requests(
        self,
        what: str,
        prompts: list,
        names: "Names",
        result_of: "Callable[[Activations], Any] | None" = None,
    ) -> "list[Request]":
        """Return a request for activations of each prompt, or for what result_of makes of them.

        what: the result, such as "embeddings".
        """
        captures_of = partial(self._inputs.captures_of, names)
        return self._requests_with(captures_of, what, prompts, result_of)

    def _look(self, what: str, prompts: list, names: "Names", edits: "EditsType") -> "list[Activations]":
        return self._results(self._looking_requests(what, prompts, names, edits))

    def _looking_requests(
        self, what: str, prompts: list, names: "Names", edits: "EditsType"
    ) -> "list[Request]":
        """Return a request for Activations of each prompt, with the logits next to the names. Raise RequestError."""
        edits = SamplingParams(edits=edits).edits

        def captures_of(token_ids: list[int]) -> "Captures":
            num_prompt = len(token_ids)
            captures = self._inputs.captures(names, edits, num_prompt, num_prompt, len(prompts))
            captures.add_logits()
            return captures

        return self._requests_with(captures_of, what, prompts, edits=edits)

    def _requests_with(
        self,
        captures_of: "Callable[[list[int]], Captures]",
        what: str,
        prompts: list,
        result_of: "Callable[[Activations], Any] | None" = None,
        edits: "EditsType" = (),
    ) -> "list[Request]":
        from ..engine.input_processor import reading_request

        def result(captures: "Captures", output: "RequestOutput") -> Any:
            (sample,) = output.outputs
            captures.restart()  # the sample alone has the arrays
            return sample.activations if result_of is None else result_of(sample.activations)

        self.engine.check_open()
        params = SamplingParams(max_tokens=0, edits=edits)
        requests = []
        for ids in [self._inputs.read_ids(what, prompt) for prompt in prompts]:
            captures = captures_of(ids)
            requests.append(reading_request(ids, params, [captures], partial(result, captures)))
        return requests


def _some(field: str, prompts: Prompts) -> list:
    if not (listed := prompt_list(prompts)):
        raise RequestError("is empty and must have a prompt.", field)
    return listed


class Parameters:
    """The parameters of a checkpoint, which is opened when they are asked for, also in another process."""

    def __init__(self, args: LLMArgs):
        self._args = args

    def __reduce__(self) -> tuple:
        return Parameters, (self._args,)

    def __call__(self, name: str) -> np.ndarray:
        if self._checkpoint.converted_to:
            raise RequestError(
                f"{name} is packed in this converted checkpoint: load the one that it was made from."
            )
        return self._checkpoint.tensor(name)

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return ModelSource.open(replace(self._args, lora_modules=None)).checkpoint


def points_of(source: ModelSource, args: LLMArgs, seen: Iterable[str] | None) -> "Callable[[], HookPoints]":
    """Return a function that makes the points of a loaded model. It keeps no weights: parameters are read anew.

    seen: kinds that are shown; None: the backend's.
    """
    backend = source.backend
    seen = backend.SEEN if seen is None else seen
    config = source.config
    kv_cache_dtype = source.kv_cache_dtype
    tensor = Parameters(args)

    @cache
    def points() -> "HookPoints":
        from .hooks import HookPoints

        return HookPoints(config, seen, backend.CHANGED, tensor, kv_cache_dtype)

    return points
