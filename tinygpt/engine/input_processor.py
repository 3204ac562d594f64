"""InputProcessor: from a caller's prompt and params to a checked Request."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError, RequestError, closed, invalid
from ..fields import MAX_SEED
from ..llm_args import EngineConfig, LLMArgs, PathOrId
from ..outputs import OnChunk, RequestOutput, StreamChunk
from ..sampling_params import SamplingParams
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from ..weights.config import ModelConfig
from .model_runner import ModelSource, load_tokenizer
from .prompts import (
    Fitted,
    Prompt,
    Prompts,
    PromptType,
    VirtualTokens,
    check_ids,
    check_vocabulary,
    describe_positions,
    encode,
    fit,
    prompt_list,
    text_or_ids,
)
from .sampling_state import Breakers, Sample, TokenRules
from .scheduler import SINGLE_USE_IDS
from .sequence import Request, Sequence, copied

logger = logging.getLogger(__name__)
if TYPE_CHECKING:
    from ..look.captures import Captures
    from ..look.edits import EditsType
    from ..look.hooks import HookPoints, Names
    from ..weights.adapters.peft import SoftPrompt
    from .guided import Guidance, Guide
    from .part import Part
    from .prompt_scorer import PromptScorer
    from .spec_decode import Drafter, DraftModel
    from .words import BreakerFinder


class InputProcessor:
    """Makes the requests of one model. Raises RequestError for an impossible one."""

    def __init__(
        self,
        source: ModelSource,
        args: LLMArgs,
        engine_config: EngineConfig,
        points: "Callable[[], HookPoints] | None" = None,
        can_look: bool = False,
        draft_model: "DraftModel | None" = None,
    ):
        """points: None if no request reads activations. can_look: whether requests may have captures and edits."""
        self._config = source.config
        self._engine_config = engine_config
        self._positions = describe_positions(engine_config.max_model_len, source.config.n_positions)
        self._points = points
        self._can_look = can_look
        self._draft_model = draft_model
        self._soft_prompts = SoftPrompts(args.soft_prompts or {}, source.config)
        self._lora_modules = tuple(args.lora_modules or ())
        self._guidance: Guidance | None = None  # made for the first guided request
        self._guidance_lock = threading.Lock()
        self._has_open_schemas = args.open_schemas
        self._is_closed = False
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_error: CheckpointError | None = None
        self._breaker_finder: BreakerFinder | None = None  # made for the first of dry_sequence_breakers
        try:
            self._tokenizer = load_tokenizer(source.checkpoint, args.split_special_tokens)
        except CheckpointError as error:  # token ids work without one
            self._tokenizer_error = type(error)(str(error))  # without frames, which would keep all weights
        rows = source.config.vocab_size
        self._unwritten = range(self._tokenizer.vocab_size if self._tokenizer else rows, rows)
        if self._unwritten:
            logger.warning(
                "%s has %d rows of no token, from id %d on: none is drawn, unless logit_bias, allowed_token_ids or "
                "stop_token_ids name it",
                source.checkpoint.path,
                len(self._unwritten),
                self._unwritten.start,
            )

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise type(self._tokenizer_error)(str(self._tokenizer_error))  # a copy: raising adds frames
        return self._tokenizer

    def close(self) -> None:
        with self._guidance_lock:  # a request that is under way starts no grammar process afterwards
            if self._guidance is not None:
                self._guidance.close()
            self._guidance = None
            self._is_closed = True

    def read_prompt(self, prompt: PromptType, split_special_tokens: bool | None = None) -> Prompt:
        """Encode a text, or check token ids; a Prompt was read before. An empty prompt starts at the BOS token."""
        if not (split_special_tokens is None or isinstance(split_special_tokens, bool)):
            raise invalid("split_special_tokens", split_special_tokens, "True or False")
        if isinstance(prompt, Prompt):
            if split_special_tokens is None:
                return prompt
            raise RequestError(
                "split_special_tokens is given with a prompt that has been read already: give its text."
            )
        content = text_or_ids(prompt)
        vocab_size = self._config.vocab_size
        text = content if isinstance(content, str) else None
        if text is None:
            token_ids = check_ids(content, vocab_size)
        else:
            token_ids = encode(text, self.tokenizer, vocab_size, split_special_tokens) if text else []
        if not token_ids:  # some tokenizers leave nothing of white space
            bos_token_id = self._config.bos_token_id
            if bos_token_id is None or not 0 <= bos_token_id < vocab_size:
                raise RequestError(
                    "the prompt is empty and this model has no BOS token to start from: give it some text."
                )
            token_ids = [bos_token_id]
        return Prompt(text, token_ids)

    def read_ids(self, what: str, prompt: PromptType) -> list[int]:
        """Return the ids of a prompt that nothing follows. what: the result, such as "logits"."""
        content = text_or_ids(prompt)
        if not content:
            raise RequestError(f"{what} need at least one token id: the list is empty.")
        token_ids = self.read_prompt(content).token_ids
        if len(token_ids) > self._engine_config.max_model_len:
            raise RequestError(
                f"{len(token_ids)} token ids were given, but {self._positions}: give at most "
                f"{self._engine_config.max_model_len}."
            )
        return token_ids

    def request(self, prompt: PromptType, params: SamplingParams, on_chunk: OnChunk | None = None) -> Request:
        arrival = time.perf_counter()
        fitted = self._fit(prompt, params)
        params = fitted.params
        sequences = self._sequences(fitted, self._sample(fitted, arrival, on_chunk))
        if params.num_beams > 1:
            from .beam_search import Beams

            Beams(sequences, self._eos_token_ids(params), partial(self._text_stream, params))
        return Request(fitted.prompt, params, sequences, arrival, fitted.num_truncated, self._tokenizer)

    def num_truncated_tokens(self, prompt: PromptType, params: SamplingParams) -> int:
        return self._fit(prompt, params).num_truncated

    def check_guide(self, params: SamplingParams) -> None:
        """Raise RequestError if no text can follow the grammar. A new grammar can take seconds."""
        if params.guidance is not None:
            self._get_guidance(params.guidance[0]).check(*params.guidance)

    def num_virtual_tokens(self, soft_prompt: str | None) -> int:
        return len(self._soft_prompts.find(soft_prompt) or ())

    def scoring_requests(
        self,
        prompt: PromptType,
        continuations: Prompts,
        soft_prompt: str | None,
        split_special_tokens: bool | None,
        edits: "EditsType" = (),
    ) -> list[Request]:
        """Return one request for each continuation of the prompt, which finds its log probabilities."""
        virtual = self._soft_prompts.find(soft_prompt)
        prompt = text_or_ids(prompt)
        params = SamplingParams(max_tokens=0, soft_prompt=soft_prompt, edits=edits)
        endings = map(text_or_ids, prompt_list(continuations))
        pairs = (self._read_pair(prompt, ending, split_special_tokens) for ending in endings)
        return [self._scoring_request(*pair, virtual, params) for pair in pairs]

    def captures_of(self, names: "Names", token_ids: list[int]) -> "Captures":
        """Return the captures of a prompt that the engine reads, of any size."""
        from ..look.captures import Captures

        return Captures.of(names, (), self._points(), len(token_ids), len(token_ids))

    def _read_pair(
        self, before: str | list[int], after: str | list[int], split: bool | None
    ) -> tuple[list[int], list[int]]:
        """Split as `LLM.score` says."""
        if not after:
            raise RequestError("a text to score is empty and must have a token.")
        are_texts = isinstance(before, str) and isinstance(after, str)
        if are_texts:
            whole = before + after
            before = before.rstrip()
            after = whole[len(before) :]
        context = self.read_prompt(before, split).token_ids
        token_ids = self.read_prompt(after, split).token_ids
        if are_texts and before:
            together = self.tokenizer.encode(whole, split)
            if together[: len(context)] == context and len(together) > len(context):
                token_ids = together[len(context) :]
        return context, token_ids

    def _scoring_request(
        self,
        context: list[int],
        continuation: list[int],
        virtual: VirtualTokens | None,
        params: SamplingParams,
    ) -> Request:
        """Return a request that reads both without the last token."""
        from .prompt_scorer import PromptScorer

        context = [*(virtual.token_ids if virtual else ()), *context]
        total = len(context) + len(continuation)
        most = self._engine_config.max_model_len + 1
        if total > most:
            raise RequestError(
                f"the prompt has {len(context)} tokens and a continuation {len(continuation)}, together {total}, but "
                f"{self._positions}: shorten them to {most} tokens together, the last of which needs no position."
            )
        token_ids = context + continuation[:-1]
        scorer = PromptScorer(len(context) - 1, continuation, num_best=1)
        parts: list[Part] = [scorer]
        if params.edits:
            parts.append(self.captures((), params.edits, len(context), len(token_ids)))
        return reading_request(token_ids, params, parts, lambda _: scorer.score(self._tokenizer), virtual)

    def _fit(self, prompt: PromptType, params: SamplingParams) -> Fitted:
        prompt = self.read_prompt(prompt)
        check_vocabulary(params, self._config.vocab_size)
        if params.stop and self._tokenizer is None:
            raise RequestError(f"needs a tokenizer: {self._tokenizer_error} Use stop_token_ids.", "stop")
        if params.bad_words:
            from .words import resolve_bad_words

            known = partial(encode, tokenizer=self.tokenizer, vocab_size=self._config.vocab_size)
            params = resolve_bad_words(params, known)
        self.check_guide(params)
        if params.num_beams > self._engine_config.max_num_seqs:
            raise RequestError(
                f"is {params.num_beams} and max_num_seqs is {self._engine_config.max_num_seqs}: the beams of a search "
                "run at once, so lower the one or raise the other.",
                "num_beams",
                params.num_beams,
            )
        if params.lora_request is not None and params.lora_request not in self._lora_modules:
            raise _unknown("lora_request", params.lora_request, self._lora_modules, "lora_modules")
        virtual = self._soft_prompts.find(params.soft_prompt, params.prompt_embeds)
        return fit(prompt, virtual, params, self._engine_config.max_model_len, self._positions)

    def _sample(self, fitted: Fitted, arrival: float, on_chunk: OnChunk | None) -> Sample:
        params = fitted.params
        eos_token_ids = frozenset(self._eos_token_ids(params))
        if on_chunk is not None and _num_sequences(params) < params.n:
            on_chunk = _for_all_samples(on_chunk, params.n)
        breakers = self._breakers(params) if params.dry_multiplier else {}
        return Sample(
            fitted.token_ids,
            params,
            params.seed if params.seed is not None else secrets.randbits(MAX_SEED.bit_length()),
            eos_token_ids,
            deadline=None if params.max_time is None else arrival + params.max_time,
            window=fitted.window,
            on_chunk=on_chunk,
            soft_prompt=fitted.virtual,
            adapter=-1 if params.lora_request is None else self._lora_modules.index(params.lora_request),
            token_rules=TokenRules.of(
                params, eos_token_ids, self._config.vocab_size, breakers, self._unwritten
            ),
        )

    def _sequences(self, fitted: Fitted, sample: Sample) -> list[Sequence]:
        count = _num_sequences(fitted.params)
        features = self._drafter(fitted), self._prompt_scorer(fitted), self._captures(fitted, count)
        parts = [part for part in features if part is not None]
        return [
            Sequence(
                sample,
                index,
                text=self._text_stream(fitted.params),
                guide=self._guide(sample),
                parts=tuple(own for part in parts if (own := part.of_sample(index)) is not None),
            )
            for index in range(count)
        ]

    # A request's features; None for a request without one. Their modules are imported if a request asks for them.

    def _guide(self, sample: Sample) -> "Guide | None":
        guidance = sample.params.guidance
        if guidance is None:
            return None
        return self._get_guidance(guidance[0]).guide(guidance, sample.end_token_ids)

    def _drafter(self, fitted: Fitted) -> "Drafter | None":
        params = fitted.params
        has_own_steps = params.num_beams > 1 or params.capture or params.edits
        if has_own_steps or (self._draft_model is None and not params.prompt_lookup_num_tokens):
            return None
        from .spec_decode import Drafter

        return Drafter(self._engine_config, self._draft_model)

    def _prompt_scorer(self, fitted: Fitted) -> "PromptScorer | None":
        num_best = fitted.params.prompt_logprobs
        if num_best is None:
            return None
        from .prompt_scorer import PromptScorer

        return PromptScorer(fitted.num_virtual, fitted.prompt.token_ids[1:], num_best)

    def _captures(self, fitted: Fitted, count: int) -> "Captures | None":
        params = fitted.params
        if not (params.capture or params.edits):
            return None
        num_prompt = len(fitted.token_ids)
        length = num_prompt + max(params.max_tokens - 1, 0)
        return self.captures(params.capture, params.edits, num_prompt, length, count)

    def captures(
        self, capture: "Names", edits: "EditsType", num_prompt: int, length: int, count: int = 1
    ) -> "Captures":
        """Return the captures of `count` texts of `length` positions. Raise RequestError."""
        from ..look.captures import Captures, check_size

        if not self._can_look:
            raise RequestError("need an LLM of one process, without ranks or Ray.", "capture and edits")
        captures = Captures.of(capture, edits, self._points(), num_prompt, length)
        most = self._engine_config.max_model_len
        for one in chain(*captures.edits.values()):
            if one.last >= most:
                raise invalid("edits.at", one.edit.at, f"below max_model_len, {most}")
        check_size(captures, length, count, self._engine_config.max_capture_bytes)
        return captures

    def _eos_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return self._config.eos_token_ids if params.eos_token_id is None else params.eos_token_id

    def _get_guidance(self, field: str) -> "Guidance":
        with self._guidance_lock:
            if self._guidance is None:
                if self._tokenizer is None:
                    raise RequestError(f"needs a tokenizer: {self._tokenizer_error}", field)
                if self._is_closed:
                    raise closed("LLM")
                from .guided import Guidance  # sockets and subprocess: rarely needed

                self._guidance = Guidance(self._tokenizer, self._config.vocab_size, self._has_open_schemas)
            return self._guidance

    def _breakers(self, params: SamplingParams) -> Breakers:
        if not params.dry_sequence_breakers:
            return {}
        if self._tokenizer is None:
            reason = f"needs a tokenizer: {self._tokenizer_error} Give an empty list."
            raise RequestError(reason, "dry_sequence_breakers")
        if self._breaker_finder is None:
            from .words import BreakerFinder

            self._breaker_finder = BreakerFinder(self._tokenizer, self._config.vocab_size)
        return self._breaker_finder.find(params.dry_sequence_breakers)

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens)
        return TextStream(detokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)


def reading_request(
    token_ids: list[int],
    params: SamplingParams,
    parts: "Iterable[Part]",
    result_of: Callable[[RequestOutput], Any],
    virtual: VirtualTokens | None = None,
) -> Request:
    """Return a request that ends with its prompt."""
    sample = Sample(token_ids, params, 0, frozenset(), soft_prompt=virtual)
    sequence = Sequence(sample, parts=tuple(parts))
    return Request(Prompt(None, token_ids), params, [sequence], result_of=result_of)


class SoftPrompts:
    """The soft prompts of a model by name. No two share a virtual token id: the prefix cache tells them apart."""

    def __init__(self, sources: Mapping[str, PathOrId], config: ModelConfig):
        self._config = config
        self._next_id = -1
        self._lock = threading.Lock()
        self._named: dict[str, VirtualTokens] = {}
        for name, source in sources.items():
            from ..weights.adapters.peft import read_soft_prompt

            self._named[name] = self._add(read_soft_prompt(source, config, name))
        self._next_id = SINGLE_USE_IDS

    def find(self, name: str | None, embeds: np.ndarray | None = None) -> VirtualTokens | None:
        if embeds is not None:
            from ..weights.adapters.peft import SoftPrompt

            if embeds.shape[1] != (width := self._config.embedding_size):
                raise RequestError(
                    f"has shape {embeds.shape} and this model's embeddings are {width} wide: give an array of shape "
                    f"(P, {width}).",
                    "prompt_embeds",
                )
            return self._add(SoftPrompt("prompt", embeds=embeds))
        if name is not None and name not in self._named:
            raise _unknown("soft_prompt", name, self._named, "soft_prompts")
        return self._named.get(name)

    def _add(self, prompt: "SoftPrompt") -> VirtualTokens:
        with self._lock:  # requests come from any thread
            first = self._next_id
            self._next_id = self._next_id - len(prompt)
        return VirtualTokens(list(range(first, first - len(prompt), -1)), prompt)


def _unknown(field: str, name: str, names: Iterable[str], argument: str) -> RequestError:
    known = f"the names are {', '.join(map(repr, names))}" if names else "none was loaded"
    return RequestError(f"is {name!r} and {known}: load it with LLM({argument}={{name: path}}).", field, name)


def _num_sequences(params: SamplingParams) -> int:
    """Return the number of beams or samples; greedy samples are equal, unless functions make them differ."""
    if params.num_beams > 1:
        return params.num_beams
    are_equal = params.max_tokens == 0 or (params.temperature == 0 and not params.logits_processors)
    return 1 if are_equal else params.num_samples


def _for_all_samples(on_chunk: OnChunk, n: int) -> OnChunk:
    def give(chunk: StreamChunk) -> None:
        for index in range(n):
            prompt_logprobs = None if index else chunk.prompt_logprobs
            on_chunk(
                chunk._replace(index=index, logprobs=copied(chunk.logprobs), prompt_logprobs=prompt_logprobs)
            )

    return give
