"""InputProcessor: from what a caller gives to a Request, everything about it checked before any work."""

import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from tinygpt.engine.beams import Beams, beam_rules
from tinygpt.engine.scoring import read_continuations, scoring_request
from tinygpt.engine_config import EngineConfig
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.execution.model_source import load_tokenizer
from tinygpt.outputs import StreamChunk
from tinygpt.request.prompts import Prompt, encode, prompt_list, read_ids, read_prompt, unsalted
from tinygpt.request.request import Request
from tinygpt.request.sequence import Sequence, copied
from tinygpt.request.soft_prompts import SoftPrompts, VirtualTokens
from tinygpt.request.truncation import Fitted, fit
from tinygpt.sampling.guided import Guidance, Guide
from tinygpt.sampling.prompt_logprobs import PromptLogprobs
from tinygpt.sampling_params import MAX_SEED, SamplingParams, check_vocabulary, resolve_bad_words
from tinygpt.tokenizer.text_stream import TextStream
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.stored.packed import PackedCheckpoint

OnChunk = Callable[[StreamChunk], None]


class InputProcessor:
    """Makes the requests of one model. Raises RequestError for whatever cannot be served as asked.

    engine_config: as its `for_model` gives it. checkpoint: which has the tokenizer. soft_prompts: their sources, by
    name. split_special_tokens: as LLM has it. cache_salt: that of prompts without their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        checkpoint: Checkpoint | PackedCheckpoint,
        soft_prompts: Mapping | None,
        split_special_tokens: bool,
        cache_salt: Hashable = None,
    ):
        self._config, self._engine_config, self.cache_salt = config, engine_config, cache_salt
        self._soft_prompts = SoftPrompts(soft_prompts, config)
        self._tokenizer, self._tokenizer_error = _load_tokenizer(checkpoint, split_special_tokens)
        self._guidance: Guidance | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. NoTokenizerError if none runs here, CheckpointError if it is damaged."""
        if self._tokenizer is None:
            error = self._tokenizer_error
            raise type(error)(str(error))  # a new one: what is raised keeps the frames it goes through
        return self._tokenizer

    def close(self) -> None:
        """Give the tokenizer's memory back."""
        self._tokenizer, self._tokenizer_error = None, CheckpointError("this LLM has been closed.")
        self._guidance = None

    def read_prompt(self, prompt: Any, split_special_tokens: bool | None = None) -> Prompt:
        """A text or token ids, encoded and checked; a Prompt as it is."""
        return read_prompt(prompt, self._config, lambda: self.tokenizer, split_special_tokens, self.cache_salt)

    def read_ids(self, what: str, given: Any) -> list[int]:
        """The token ids of a prompt that `what` are wanted of and that nothing is to follow."""
        return read_ids(what, given, self._config, lambda: self.tokenizer, self._engine_config.max_model_len)

    def request(self, prompt: Any, params: SamplingParams, on_chunk: OnChunk | None = None) -> Request:
        """The request for a prompt, ready to run. on_chunk: called with each token's text as it is made."""
        arrival = time.perf_counter()
        prompt, virtual, fitted = self._fit(prompt, params)
        sequences = self._sequences(prompt, virtual, fitted, arrival, on_chunk)
        if fitted.params.num_beams > 1:
            rules = beam_rules(fitted.params, self._eos_token_ids(fitted.params))
            Beams(sequences, rules, partial(self._text_stream, fitted.params))
        return Request(prompt, fitted.params, sequences, arrival, fitted.num_truncated)

    def num_truncated_tokens(self, prompt: Any, params: SamplingParams) -> int:
        """How many tokens of the prompt's beginning its `overflow` would leave out."""
        _, _, fitted = self._fit(prompt, params)
        return fitted.num_truncated

    def num_virtual_tokens(self, soft_prompt: str | None) -> int:
        """How many positions a soft prompt takes; 0 for None."""
        return 0 if soft_prompt is None else len(self._soft_prompts.find(SamplingParams(soft_prompt=soft_prompt)))

    def scoring_requests(
        self, prompt: Any, continuations: Any, soft_prompt: str | None, split_special_tokens: bool | None
    ) -> list[Request]:
        """One request for each continuation of the prompt, which finds its log probabilities."""
        virtual = self._soft_prompts.find(SamplingParams(soft_prompt=soft_prompt))
        prompt, cache_salt = unsalted(prompt, self.cache_salt)
        pairs = read_continuations(
            prompt, prompt_list(continuations), self._config, lambda: self.tokenizer, split_special_tokens
        )
        sizes = self._engine_config.max_model_len, self._config.n_positions
        return [scoring_request(context, token_ids, virtual, cache_salt, *sizes) for context, token_ids in pairs]

    def _fit(self, prompt: Any, params: SamplingParams) -> tuple[Prompt, VirtualTokens | None, Fitted]:
        """The prompt, its soft prompt, and both as they fit into the positions there are."""
        prompt = self.read_prompt(prompt)
        check_vocabulary(params, self._config.vocab_size)
        if params.stop and self._tokenizer is None:
            raise RequestError(f"stop strings need a tokenizer: {self._tokenizer_error} Use stop_token_ids.")
        if params.bad_words:
            known = partial(encode, tokenizer=self.tokenizer, vocab_size=self._config.vocab_size)
            params = resolve_bad_words(params, known)
        if params.guidance is not None:
            self._get_guidance().check(*params.guidance)
        if params.num_beams > self._engine_config.max_num_seqs:
            raise RequestError(
                f"num_beams is {params.num_beams} and max_num_seqs is {self._engine_config.max_num_seqs}: the beams of "
                "a search run at once, so lower the one or raise the other."
            )
        virtual = self._soft_prompts.find(params)
        token_ids = prompt.token_ids if virtual is None else virtual.token_ids + prompt.token_ids
        return prompt, virtual, fit(token_ids, params, self._engine_config.max_model_len, self._config.n_positions)

    def _sequences(
        self, prompt: Prompt, virtual: VirtualTokens | None, fitted: Fitted, arrival: float, on_chunk: OnChunk | None
    ) -> list[Sequence]:
        params = fitted.params
        count = _num_sequences(params)
        wanted = [None] * count
        if params.prompt_logprobs is not None:  # the first sample finds them for all
            wanted[0] = PromptLogprobs(len(virtual or ()), prompt.token_ids[1:], params.prompt_logprobs)
        shared = {
            "prompt_token_ids": fitted.token_ids,
            "params": params,
            "seed": params.seed if params.seed is not None else secrets.randbits(MAX_SEED.bit_length()),
            "eos_token_ids": frozenset(self._eos_token_ids(params)),
            "deadline": None if params.max_time is None else arrival + params.max_time,
            "window": fitted.window,
            "on_chunk": _for_all_samples(on_chunk, params.n) if count < params.n and on_chunk else on_chunk,
            "soft_prompt": virtual,
            "cache_salt": prompt.cache_salt,
        }
        return [
            Sequence(
                index=index,
                text=self._text_stream(params),
                prompt_logprobs=wanted[index],
                guide=self._guide(params),
                **shared,
            )
            for index in range(count)
        ]

    def _eos_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return self._config.eos_token_ids if params.eos_token_id is None else params.eos_token_id

    def _get_guidance(self) -> Guidance:
        """Made for the first request that is guided, without a lock, which a fork could leave locked."""
        guidance = self._guidance
        if guidance is None:
            if self._tokenizer is None:
                raise RequestError(f"guided texts need a tokenizer: {self._tokenizer_error}")
            guidance = self._guidance = Guidance(self._tokenizer, self._config.vocab_size)
        return guidance

    def _guide(self, params: SamplingParams) -> Guide | None:
        if params.guidance is None:
            return None
        return self._get_guidance().guide(params, frozenset(self._eos_token_ids(params)))

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer()
        return TextStream(detokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)


def _num_sequences(params: SamplingParams) -> int:
    """Beams, or samples; greedy ones are equal, unless functions make them differ, so that one is enough."""
    if params.num_beams > 1:
        return params.num_beams
    return 1 if params.temperature == 0 and not params.logits_processors else params.best_of or params.n


def _for_all_samples(on_chunk: OnChunk, n: int) -> OnChunk:
    """Call on_chunk with each chunk of one sequence as with those of n samples."""

    def give(chunk: StreamChunk) -> None:
        for index in range(n):
            prompt_logprobs = None if index else chunk.prompt_logprobs
            on_chunk(chunk._replace(index=index, logprobs=copied(chunk.logprobs), prompt_logprobs=prompt_logprobs))

    return give


def _load_tokenizer(
    checkpoint: Checkpoint | PackedCheckpoint, split_special_tokens: bool
) -> tuple[Tokenizer | None, CheckpointError | None]:
    """The tokenizer, or the reason why there is none: token ids work without one."""
    try:
        return load_tokenizer(checkpoint, split_special_tokens), None
    except CheckpointError as error:
        # The error itself would keep the frames it went through, and all weights in them.
        return None, type(error)(str(error))
