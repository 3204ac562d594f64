"""InputProcessor: from a caller's prompt and params to a Request, all of it checked before any work."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tinygpt.engine.beam_search import Beams, beam_rules
from tinygpt.engine.guided import Guidance
from tinygpt.engine.model_source import EngineConfig, load_tokenizer
from tinygpt.engine.prompts import Fitted, Prompt, VirtualTokens, encode, fit, prompt_list, read_ids, read_prompt
from tinygpt.engine.sampler import PromptLogprobs
from tinygpt.engine.scheduler import SINGLE_USE_IDS
from tinygpt.engine.scoring import read_continuations, scoring_request
from tinygpt.engine.sequence import Request, Sequence, copied
from tinygpt.errors import CheckpointError, RequestError, invalid
from tinygpt.outputs import StreamChunk
from tinygpt.sampling_params import MAX_SEED, SamplingParams, check_vocabulary, resolve_bad_words
from tinygpt.tokenizer.stream import TextStream
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.adapters.soft_prompt import SoftPrompt, read_soft_prompt
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.stored.packed import PackedCheckpoint

OnChunk = Callable[[StreamChunk], None]


class InputProcessor:
    """Makes the requests of one model. Raises RequestError for an impossible one.

    engine_config: as its `for_model` returns it. checkpoint: for its tokenizer. soft_prompts, split_special_tokens: as
    LLM has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        checkpoint: Checkpoint | PackedCheckpoint,
        soft_prompts: Mapping | None,
        split_special_tokens: bool,
    ):
        self._config, self._engine_config = config, engine_config
        self._soft_prompts = SoftPrompts(soft_prompts, config)
        self._guidance: Guidance | None = None  # made for the first guided request
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_error: CheckpointError | None = None
        try:
            self._tokenizer = load_tokenizer(checkpoint, split_special_tokens)
        except CheckpointError as error:  # token ids work without one
            self._tokenizer_error = type(error)(str(error))  # without frames, which would keep all weights

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise type(self._tokenizer_error)(str(self._tokenizer_error))  # a copy: raising adds frames
        return self._tokenizer

    def close(self) -> None:
        self._tokenizer, self._tokenizer_error = None, CheckpointError("this LLM has been closed.")
        self._guidance = None

    def read_prompt(self, prompt: Any, split_special_tokens: bool | None = None) -> Prompt:
        return read_prompt(prompt, self._config, lambda: self.tokenizer, split_special_tokens)

    def read_ids(self, what: str, given: Any) -> list[int]:
        return read_ids(what, given, self._config, lambda: self.tokenizer, self._engine_config.max_model_len)

    def request(self, prompt: Any, params: SamplingParams, on_chunk: OnChunk | None = None) -> Request:
        """Return the request for a prompt. on_chunk: called with each token's text as it is made."""
        arrival = time.perf_counter()
        prompt, virtual, fitted = self._fit(prompt, params)
        sequences = self._sequences(prompt, virtual, fitted, arrival, on_chunk)
        if fitted.params.num_beams > 1:
            rules = beam_rules(fitted.params, self._eos_token_ids(fitted.params))
            Beams(sequences, rules, partial(self._text_stream, fitted.params))
        return Request(prompt, fitted.params, sequences, arrival, fitted.num_truncated)

    def num_truncated_tokens(self, prompt: Any, params: SamplingParams) -> int:
        return self._fit(prompt, params)[2].num_truncated

    def num_virtual_tokens(self, soft_prompt: str | None) -> int:
        return 0 if soft_prompt is None else len(self._soft_prompts.find(SamplingParams(soft_prompt=soft_prompt)))

    def scoring_requests(
        self, prompt: Any, continuations: Any, soft_prompt: str | None, split_special_tokens: bool | None
    ) -> list[Request]:
        """Return one request for each continuation of the prompt, which finds its log probabilities."""
        virtual = self._soft_prompts.find(SamplingParams(soft_prompt=soft_prompt))
        continuations, tokenizer_of = prompt_list(continuations), lambda: self.tokenizer
        pairs = read_continuations(prompt, continuations, self._config, tokenizer_of, split_special_tokens)
        sizes = self._engine_config.max_model_len, self._config.n_positions
        return [scoring_request(context, token_ids, virtual, *sizes) for context, token_ids in pairs]

    def _fit(self, prompt: Any, params: SamplingParams) -> tuple[Prompt, VirtualTokens | None, Fitted]:
        prompt = self.read_prompt(prompt)
        check_vocabulary(params, self._config.vocab_size)
        if params.stop and self._tokenizer is None:
            raise RequestError(f"needs a tokenizer: {self._tokenizer_error} Use stop_token_ids.", "stop")
        if params.bad_words:
            known = partial(encode, tokenizer=self.tokenizer, vocab_size=self._config.vocab_size)
            params = resolve_bad_words(params, known)
        if params.guidance is not None:
            self._get_guidance(params.guidance[0]).check(*params.guidance)
        if params.num_beams > self._engine_config.max_num_seqs:
            raise RequestError(
                f"is {params.num_beams} and max_num_seqs is {self._engine_config.max_num_seqs}: the beams of a search "
                "run at once, so lower the one or raise the other.",
                "num_beams",
                params.num_beams,
            )
        virtual = self._soft_prompts.find(params)
        token_ids = prompt.token_ids if virtual is None else virtual.token_ids + prompt.token_ids
        return prompt, virtual, fit(token_ids, params, self._engine_config.max_model_len, self._config.n_positions)

    def _sequences(
        self, prompt: Prompt, virtual: VirtualTokens | None, fitted: Fitted, arrival: float, on_chunk: OnChunk | None
    ) -> list[Sequence]:
        params, eos_token_ids = fitted.params, frozenset(self._eos_token_ids(fitted.params))
        count = _num_sequences(params)
        wanted = None
        if params.prompt_logprobs is not None:  # the first sample finds them for all
            wanted = PromptLogprobs(len(virtual or ()), prompt.token_ids[1:], params.prompt_logprobs)
        if on_chunk is not None and count < params.n:
            on_chunk = _for_all_samples(on_chunk, params.n)
        seed = params.seed if params.seed is not None else secrets.randbits(MAX_SEED.bit_length())
        guided = None if params.guidance is None else self._get_guidance(params.guidance[0])
        return [
            Sequence(
                prompt_token_ids=fitted.token_ids,
                params=params,
                seed=seed,
                index=index,
                eos_token_ids=eos_token_ids,
                text=self._text_stream(params),
                deadline=None if params.max_time is None else arrival + params.max_time,
                window=fitted.window,
                on_chunk=on_chunk,
                soft_prompt=virtual,
                prompt_logprobs=None if index else wanted,
                guide=None if guided is None else guided.guide(params, eos_token_ids),
            )
            for index in range(count)
        ]

    def _eos_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return self._config.eos_token_ids if params.eos_token_id is None else params.eos_token_id

    def _get_guidance(self, field: str) -> Guidance:
        if self._guidance is None:
            if self._tokenizer is None:
                raise RequestError(f"needs a tokenizer: {self._tokenizer_error}", field)
            self._guidance = Guidance(self._tokenizer, self._config.vocab_size)
        return self._guidance

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer()
        return TextStream(detokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)


class SoftPrompts:
    """The soft prompts of a model, by name, and the virtual token ids of its requests.

    No two soft prompts share an id, so that the prefix cache tells them apart.
    sources: a folder or file, as `read_soft_prompt` takes it, for each name.
    """

    def __init__(self, sources: Mapping[str, str | os.PathLike[str]] | None, config: ModelConfig):
        self._config = config
        self._next_id = -1
        self._lock = threading.Lock()
        sources = {} if sources is None else sources
        if not isinstance(sources, Mapping) or not all(isinstance(name, str) and name for name in sources):
            raise invalid("soft_prompts", sources, "a dict from names to folders or files")
        self._named = {name: self._add(read_soft_prompt(source, config)) for name, source in sources.items()}
        self._next_id = SINGLE_USE_IDS

    def find(self, params: SamplingParams) -> VirtualTokens | None:
        """Return the soft prompt of a request. Raise RequestError if there is none of this name or it does not fit."""
        if params.prompt_embeds is not None:
            return self._add(SoftPrompt("prompt", embeds=self._checked_embeds(params.prompt_embeds)))
        if params.soft_prompt is None:
            return None
        if params.soft_prompt not in self._named:
            known = f"the names are {', '.join(map(repr, self._named))}" if self._named else "none was loaded"
            reason = f"is {params.soft_prompt!r} and {known}: load it with LLM(soft_prompts={{name: path}})."
            raise RequestError(reason, "soft_prompt", params.soft_prompt)
        return self._named[params.soft_prompt]

    def _add(self, prompt: SoftPrompt) -> VirtualTokens:
        with self._lock:  # requests come from any thread
            first, self._next_id = self._next_id, self._next_id - len(prompt)
        return VirtualTokens(list(range(first, first - len(prompt), -1)), prompt)

    def _checked_embeds(self, embeds: np.ndarray) -> np.ndarray:
        if embeds.shape[1] != (width := self._config.embedding_size):
            raise RequestError(
                f"has shape {embeds.shape} and this model's embeddings are {width} wide: give an array of shape "
                f"(P, {width}).",
                "prompt_embeds",
            )
        return embeds


def _num_sequences(params: SamplingParams) -> int:
    """Return the number of beams or samples; greedy samples are equal, unless functions make them differ."""
    if params.num_beams > 1:
        return params.num_beams
    return 1 if params.temperature == 0 and not params.logits_processors else params.best_of or params.n


def _for_all_samples(on_chunk: OnChunk, n: int) -> OnChunk:

    def give(chunk: StreamChunk) -> None:
        for index in range(n):
            prompt_logprobs = None if index else chunk.prompt_logprobs
            on_chunk(chunk._replace(index=index, logprobs=copied(chunk.logprobs), prompt_logprobs=prompt_logprobs))

    return give
