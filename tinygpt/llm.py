"""LLM: from prompts to text. Everything a request goes through meets here, and nothing is computed here."""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from tinygpt.engine.beams import Beams, beam_rules
from tinygpt.engine.draft_model import load_draft_model
from tinygpt.engine.engine import Engine
from tinygpt.engine.probe import attention_maps, check_pooling, pool
from tinygpt.engine.scoring import read_continuations, score_of, scoring_request
from tinygpt.engine.service import Service
from tinygpt.engine_config import EngineConfig
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.execution.backend import (
    MAX_STEP_TOKENS,
    AnyCheckpoint,
    check_memory,
    load_backend,
    load_params,
    resolve_dtype,
    resolve_kv_cache_dtype,
)
from tinygpt.hardware.threads import thread_count
from tinygpt.outputs import ContinuationScore, RequestOutput, StreamChunk
from tinygpt.request.prompts import params_list, prompt_list, read_ids, read_prompt
from tinygpt.request.request import Request
from tinygpt.request.sequence import Sequence
from tinygpt.request.soft_prompts import SoftPrompts
from tinygpt.request.truncation import Fitted, fit
from tinygpt.sampling.prompt_logprobs import PromptLogprobs
from tinygpt.sampling_params import MAX_SEED, SamplingParams, check_vocabulary, resolve_bad_words
from tinygpt.session import Session, load_session
from tinygpt.tokenizer.text_stream import TextStream
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.open import open_checkpoint


class LLM:
    """A GPT-2 checkpoint, ready to generate.

    model: "demo" (embedded), a local folder in Hugging Face's layout, a Hub id such as "gpt2", or "random:124M" (355M,
        774M, 1.5B): random weights of that shape, to measure speed with no download.
    dtype: "float32", "bfloat16", "int8" or "int4"; the last two quantise as they load. "auto" is the dtype that a
        converted checkpoint was converted to, and float32 for any other.
    device: "cpu"; "cuda" (one NVIDIA card; float32, bfloat16 or int8 weights); or "reference" (NumPy, float64 inside,
        slow, float32 weights only).
    threads: how many threads compute; None is one for each physical core.
    max_num_seqs: samples that run at once; more wait their turn.
    max_model_len: positions kept for each; None is the model's own n_positions.
    kv_cache_dtype: "float32", "bfloat16", or "auto": float32 for float32 weights, bfloat16 for the others.
    max_num_batched_tokens: new tokens in a step, max_num_seqs or more; None is 512 (2048 on a card), or max_num_seqs
        if that is more.
        Fewer let those that decode wait less for others' prompts, more read prompts faster.
    prefix_cache_seqs: ended samples that stay in memory for prompts that begin like them; 0 is none. Each takes as
        much as a running one: 4 add an eighth to what 32 take, and hold a common beginning and a few conversations.
        What prompts that run at once have in common is computed once in any case.
    max_queue: submitted samples that may wait while max_num_seqs run; None is any number.
    draft_model: a smaller checkpoint with the same vocabulary, which guesses num_speculative_tokens for each step of
        this one to confirm: fewer steps, the same results.
    lora: a folder in PEFT's layout with a LoRA adapter, which is merged into the weights.
    soft_prompts: {name: folder in PEFT's layout, or file}: what requests can name as their soft_prompt, trained by
        prompt tuning, p-tuning or prefix tuning.

    Raises CheckpointError if the checkpoint cannot be loaded, RequestError for an impossible argument.
    Results do not depend on threads, on these sizes or on what else is running, to the last bit. Several Python
    threads may call one LLM: their requests share its steps.
    """

    def __init__(
        self,
        model: str = "demo",
        dtype: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        max_num_batched_tokens: int | None = None,
        prefix_cache_seqs: int = 4,
        max_queue: int | None = None,
        draft_model: str | None = None,
        num_speculative_tokens: int = 4,
        lora: str | os.PathLike[str] | None = None,
        soft_prompts: Mapping[str, str | os.PathLike[str]] | None = None,
    ):
        threads = thread_count(threads)
        _check_sizes(max_num_seqs, max_model_len, max_num_batched_tokens, prefix_cache_seqs, max_queue)
        _check_count("num_speculative_tokens", num_speculative_tokens, 1)
        backend = load_backend(device, dtype)
        checkpoint = open_checkpoint(model)
        if lora is not None:
            checkpoint = merge_lora(checkpoint, lora)
        given_dtype = dtype
        self.dtype = dtype = resolve_dtype(dtype, device, checkpoint)
        kv_cache_dtype = resolve_kv_cache_dtype(kv_cache_dtype, device, dtype)
        self.config = checkpoint.config
        if max_model_len is not None and max_model_len > self.config.n_positions:
            raise RequestError(
                f"max_model_len is {max_model_len} and this model has {self.config.n_positions} positions."
            )
        self.max_model_len = max_model_len or self.config.n_positions
        self._soft_prompts = SoftPrompts(soft_prompts, self.config)
        self._tokenizer, self._tokenizer_error = _load_tokenizer(checkpoint)
        step_tokens = max_num_batched_tokens or max(MAX_STEP_TOKENS[device], max_num_seqs)
        limits = EngineConfig(max_num_seqs, prefix_cache_seqs, self.max_model_len, step_tokens)
        check_memory(device, checkpoint, dtype, kv_cache_dtype, limits)
        params = load_params(backend, checkpoint, dtype, threads)
        draft = None
        if draft_model is not None:
            draft_dtypes = given_dtype, kv_cache_dtype
            draft = load_draft_model(
                draft_model, num_speculative_tokens, self.config, limits, device, *draft_dtypes, threads
            )
        self._engine = Engine(backend, params, self.config, limits, dtype, kv_cache_dtype, threads, draft)
        self._service = Service(self._engine, max_queue)
        self._is_closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError if it has none that can be read."""
        self._check_open()
        if self._tokenizer is None:
            raise CheckpointError(self._tokenizer_error)
        return self._tokenizer

    def generate(self, prompts: Any, params: Any = None) -> list[RequestOutput]:
        """Continue each prompt. The outputs are in the prompts' order.

        prompts: a text, a list of texts, or lists of token ids, of any lengths. An empty prompt starts at BOS.
        params: one SamplingParams, or one for each prompt.
        Raises RequestError, before any work, if a prompt cannot be served as asked.
        """
        outputs = dict(self.generate_as_finished(prompts, params))
        return [outputs[i] for i in sorted(outputs)]

    def generate_as_finished(self, prompts: Any, params: Any = None) -> Iterator[tuple[int, RequestOutput]]:
        """As `generate`, but yields (index of the prompt, output) as soon as each is finished.

        Everything is checked when this is called; closing the iterator frees what was still running.
        """
        self._check_open()
        prompts = prompt_list(prompts)
        pairs = zip(prompts, params_list(params, len(prompts)), strict=True)
        return self._run([self._request(prompt, p) for prompt, p in pairs])

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Continue one prompt, token by token. Checked when called; closing the iterator ends the request.

        A chunk's text never ends inside a character, and all chunks together are the text of `generate`.
        """
        return self._stream(self._single_request(prompt, params, has_chunks=True))

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        on_chunk: Callable[[StreamChunk], None] | None = None,
    ) -> "Future[RequestOutput]":
        """Continue one prompt while the caller does something else. Any thread may call this, at any time.

        Requests of all callers share the engine's steps, which a thread in the background takes. Cancelling the
        future, before or during the run, frees what the request holds within a step.
        on_chunk: called with each StreamChunk as it is made, by the thread that takes the step, which waits for it.
        Raises, before any work, RequestError if the prompt cannot be served as asked, and QueueFullError if max_queue
        samples are waiting already.
        """
        if on_chunk is not None and not callable(on_chunk):
            raise RequestError(f"on_chunk is {on_chunk!r} and must be a function of one StreamChunk.")
        request = self._single_request(prompt, params, has_chunks=on_chunk is not None)
        for sequence in request.sequences:
            sequence.on_chunk = on_chunk
        return self._service.submit(request)

    def num_truncated_tokens(self, prompt: Any, params: SamplingParams | None = None) -> int:
        """How many tokens of the prompt's beginning its overflow would leave out. Raises as `generate` does."""
        return self._single_request(prompt, params, has_chunks=False).num_truncated

    def session(self) -> Session:
        """A text, empty at first, to be written in turns; its context is not computed again for each."""
        self._check_open()
        return Session(self, self._engine, [])

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """What Session.save has written, its keys and values included. CheckpointError if it is of another model."""
        self._check_open()
        return load_session(self, self._engine, path)

    def logits(self, token_ids: Any) -> np.ndarray:
        """Teacher-forced logits, (T, V) float32: row t is what the model says after token_ids[: t + 1].

        Raises RequestError for an empty list, ids outside the vocabulary or more than max_model_len ids.
        """
        return self._engine.logits(self._read_ids("logits", token_ids))

    def hidden_states(self, token_ids: Any) -> np.ndarray:
        """(L + 1, T, C) float32, as Hugging Face's: the input of each layer, and last what ln_f makes of the output.

        Raises as `logits` does.
        """
        return self._engine.hidden_states(self._read_ids("hidden states", token_ids))

    def attentions(self, token_ids: Any) -> np.ndarray:
        """(L, H, T, T) float32: how much each position attends to each at or before it, 4 L H T**2 bytes.

        Raises as `logits` does.
        """
        token_ids = self._read_ids("attentions", token_ids)
        return attention_maps(*self._engine.queries_and_keys(token_ids), self.config)

    def embed(self, prompts: Any, pooling: str = "last") -> np.ndarray:
        """A vector for each text or list of token ids, (len(prompts), C) float32, made of its last hidden states.

        pooling: "last" is the last token's, "mean" and "sum" are over all tokens.
        Raises RequestError, before any work, as `logits` does.
        """
        self._check_open()
        check_pooling(pooling)
        given = [self._read_ids("embeddings", prompt) for prompt in prompt_list(prompts)]
        states = (self._engine.hidden_states(token_ids, slice(-1, None))[0] for token_ids in given)  # (T, C) each
        vectors = [pool(of_prompt, pooling) for of_prompt in states]
        return np.stack(vectors) if vectors else np.empty((0, self.config.n_embd), np.float32)

    def score(self, prompt: Any, continuations: Any, soft_prompt: str | None = None) -> list[ContinuationScore]:
        """How probable each continuation of the prompt is, by the model's own probabilities; the prompt is read once.

        prompt: a text or token ids; an empty one is the BOS token. continuations: texts, or lists of token ids.
        Texts are encoded as evaluation harnesses do: white space at the end of the prompt counts as the beginning of
        each continuation, prompt and continuation are encoded together, and what follows the prompt's own tokens is
        the continuation. Where these come out otherwise, or either is token ids, both are encoded apart.
        soft_prompt: the name of one of the LLM's soft prompts, to stand in front of the prompt.
        Raises RequestError, before any work, if a continuation is empty or too long.
        """
        self._check_open()
        virtual = self._soft_prompts.find(SamplingParams(soft_prompt=soft_prompt))
        pairs = read_continuations(prompt, prompt_list(continuations), self.config, lambda: self.tokenizer)
        sizes = self.max_model_len, self.config.n_positions
        requests = [scoring_request(context, token_ids, virtual, *sizes) for context, token_ids in pairs]
        deque(self._run(requests), maxlen=0)
        return [score_of(request) for request in requests]

    def close(self) -> None:
        """Give the memory back. Any later call raises RequestError, and so does every future that is not done.

        RequestError, and nothing is closed, in a function that the engine calls during a step.
        """
        self._engine.refuse_within_step()
        self._is_closed, self._tokenizer = True, None
        self._service.close()
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def step(self) -> None:
        """Advance every running sequence: one forward pass, one new token for each that is not still in its prompt."""
        self._engine.step()

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, RequestOutput]]:
        pending, finished = dict(enumerate(requests)), deque()
        for i, request in pending.items():
            request.when_finished(partial(finished.append, i))
        try:
            for request in requests:
                self._engine.add(request.sequences)
            while pending:
                self.step()
                while finished:  # by this thread's step or by another's
                    i = finished.popleft()
                    yield i, pending.pop(i).output()
        finally:
            for request in pending.values():
                self._engine.remove(request.sequences)

    def _stream(self, request: Request) -> Iterator[StreamChunk]:
        chunks, ends = deque(), []
        request.sequences[0].on_chunk = chunks.append
        request.when_finished(lambda: ends.append(True))
        try:
            self._engine.add(request.sequences)
            while True:
                is_ended = bool(ends)  # before `chunks` is looked at: the last comes before the end
                if chunks:
                    yield chunks.popleft()
                elif is_ended:
                    break
                else:
                    self.step()
            request.raise_error()
        finally:
            self._engine.remove(request.sequences)

    def _read_ids(self, what: str, token_ids: Any) -> list[int]:
        self._check_open()
        return read_ids(what, token_ids, self.config, lambda: self.tokenizer, self.max_model_len)

    def _single_request(self, prompt: Any, params: SamplingParams | None, has_chunks: bool) -> Request:
        """The request of a call that takes one prompt, and one sample where it is given in chunks."""
        params = params_list(params, 1)[0]
        if has_chunks and params.n != 1:
            raise RequestError(f"n is {params.n} and a stream has one sample: set n to 1, or use generate.")
        if has_chunks and params.num_beams > 1:
            raise RequestError(f"num_beams is {params.num_beams} and a search has no text until it ends: use generate.")
        if has_chunks and params.best_of not in (None, 1):
            raise RequestError(f"best_of is {params.best_of} and a stream cannot choose among samples: use generate.")
        prompts = prompt_list(prompt)
        if len(prompts) > 1:
            raise RequestError(f"{len(prompts)} prompts were given and this takes one: use generate.")
        return self._request(prompts[0] if prompts else prompts, params)

    def _request(self, prompt: Any, params: SamplingParams) -> Request:
        """Check everything about a prompt and its parameters; RequestError if it cannot be served."""
        self._check_open()
        arrival = time.perf_counter()
        prompt = read_prompt(prompt, self.config, lambda: self.tokenizer)
        check_vocabulary(params, self.config.vocab_size)
        if params.stop and self._tokenizer is None:
            raise RequestError(f"stop strings need a tokenizer: {self._tokenizer_error} Use stop_token_ids.")
        if params.bad_words:
            params = resolve_bad_words(params, self.tokenizer.encode)
        virtual = self._soft_prompts.find(params)
        token_ids = prompt.token_ids if virtual is None else virtual.token_ids + prompt.token_ids
        fitted = fit(token_ids, params, self.max_model_len, self.config.n_positions)
        sequences, params = self._sequences(fitted, arrival), fitted.params
        for sequence in sequences:
            sequence.soft_prompt = virtual
        if params.prompt_logprobs is not None:
            sequences[0].prompt_logprobs = PromptLogprobs(
                len(virtual or ()), prompt.token_ids[1:], params.prompt_logprobs
            )
        if params.num_beams > 1:
            self._make_beams(sequences, params)
        return Request(prompt, params, sequences, arrival, fitted.num_truncated)

    def _sequences(self, fitted: Fitted, arrival: float) -> list[Sequence]:
        params = fitted.params
        seed = params.seed if params.seed is not None else secrets.randbelow(MAX_SEED + 1)
        eos = frozenset(self._eos_token_ids(params))
        deadline = None if params.max_time is None else arrival + params.max_time
        return [
            Sequence(fitted.token_ids, params, seed, index, eos, self._text_stream(params), deadline, fitted.window)
            for index in range(params.num_beams if params.num_beams > 1 else params.best_of or params.n)
        ]

    def _eos_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return self.config.eos_token_ids if params.eos_token_id is None else params.eos_token_id

    def _make_beams(self, sequences: list[Sequence], params: SamplingParams) -> None:
        """Have sequences run as the beams of one search."""
        if params.num_beams > self._engine.limits.max_num_seqs:
            raise RequestError(
                f"num_beams is {params.num_beams} and max_num_seqs is {self._engine.limits.max_num_seqs}: the beams of "
                "a search run at once, so lower the one or raise the other."
            )
        beams = Beams(sequences, beam_rules(params, self._eos_token_ids(params)), partial(self._text_stream, params))
        for sequence in sequences:
            sequence.beams = beams

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        detokenizer = self._tokenizer.detokenizer()
        return TextStream(detokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this LLM has been closed: make a new one.")


def _load_tokenizer(checkpoint: AnyCheckpoint) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or the reason why there is none: token ids work without one."""
    try:
        return Tokenizer.from_folder(checkpoint.path), ""
    except CheckpointError as error:
        return None, str(error)  # the error itself would keep the frames it went through, and all weights in them


def _check_sizes(max_num_seqs, max_model_len, max_num_batched_tokens, prefix_cache_seqs, max_queue) -> None:
    _check_count("max_num_seqs", max_num_seqs, 1)
    _check_count("prefix_cache_seqs", prefix_cache_seqs, 0)
    if max_model_len is not None:
        _check_count("max_model_len", max_model_len, 1)
    if max_queue is not None:
        _check_count("max_queue", max_queue, 0)
    if max_num_batched_tokens is not None:
        _check_count("max_num_batched_tokens", max_num_batched_tokens, 1)
        if max_num_batched_tokens < max_num_seqs:
            raise RequestError(
                f"max_num_batched_tokens is {max_num_batched_tokens} and max_num_seqs is {max_num_seqs}: each sample "
                "that runs needs a token of every step, so raise the one or lower the other."
            )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {value!r} and must be a whole number, {least} or more.")
