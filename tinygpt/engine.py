"""LLM: from prompts to text. Everything a request goes through meets here, and nothing is computed here."""

import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygpt.backend import load_backend, load_params, resolve_dtype, resolve_kv_cache_dtype
from tinygpt.batch import Batch
from tinygpt.errors import CheckpointError, RequestError, TinyGPTError
from tinygpt.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from tinygpt.prompts import Prompt, check_length, checked_ids, describe_positions, params_list, prompt_list, read_prompt
from tinygpt.sampling_params import MAX_SEED, SamplingParams
from tinygpt.scheduler import Chunk, Scheduler
from tinygpt.sequence import Sequence
from tinygpt.text_stream import TextStream
from tinygpt.threads import thread_count
from tinygpt.tokenizer import Tokenizer
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.packed import PackedCheckpoint, open_checkpoint

# New tokens in a step: enough for the matrix products to run at full speed, few enough that a decoding
# sequence never waits long for a neighbour's prompt.
MAX_STEP_TOKENS = 512
# Rows whose logits are computed together when all are wanted: 64 x 50257 x 4 bytes are 13 MB.
LOGIT_ROWS = 64
NOT_FINITE = (
    "the model's logits at position {} are not finite numbers: the checkpoint is damaged, or its activations "
    "overflow float32."
)


@dataclass
class _Request:
    """A prompt and the sequences that continue it, in order of their index."""

    prompt: Prompt
    params: SamplingParams
    sequences: list[Sequence]
    arrival: float = field(default_factory=time.perf_counter)

    @property
    def is_started(self) -> bool:
        return self.sequences[0].num_cached > 0

    @property
    def is_finished(self) -> bool:
        return all(s.is_finished for s in self.sequences)

    def output(self) -> RequestOutput:
        """What a finished request gives back; the error of the first sequence that failed, if any did."""
        self.raise_error()
        first = min(s.first_token_time for s in self.sequences)
        last = max(s.finished_time for s in self.sequences)
        return RequestOutput(
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[_completion(s) for s in self.sequences],
            metrics=RequestMetrics(self.arrival, first, last),
        )

    def raise_error(self) -> None:
        for error in [s.error for s in self.sequences if s.error]:
            raise TinyGPTError(error)


class LLM:
    """A GPT-2 checkpoint, ready to generate.

    model: "demo" (embedded), a local folder in Hugging Face's layout, or a Hub id such as "gpt2".
    dtype: "float32", "bfloat16", "int8" or "int4"; the last two quantise as they load. "auto" is the dtype that a
        converted checkpoint was converted to, and float32 for any other.
    device: "cpu", or "reference" (NumPy, float64 inside, slow, float32 weights only).
    threads: how many threads compute; None is one for each physical core.
    max_num_seqs: sequences that run at once; more wait their turn.
    max_model_len: positions kept for each; None is the model's own n_positions.
    kv_cache_dtype: "float32", "bfloat16", or "auto": float32 for float32 weights, bfloat16 for the others.

    Raises CheckpointError if the checkpoint cannot be loaded, RequestError for an impossible argument.
    Results do not depend on threads, max_num_seqs or on what else is running, to the last bit. Several Python
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
    ):
        threads = thread_count(threads)
        _check_positive("max_num_seqs", max_num_seqs)
        if max_model_len is not None:
            _check_positive("max_model_len", max_model_len)
        self._backend = load_backend(device, dtype)
        checkpoint = open_checkpoint(model)
        self.dtype = dtype = resolve_dtype(dtype, device, checkpoint)
        kv_cache_dtype = resolve_kv_cache_dtype(kv_cache_dtype, device, dtype)
        self.config = checkpoint.config
        if max_model_len is not None and max_model_len > self.config.n_positions:
            raise RequestError(
                f"max_model_len is {max_model_len} and this model has {self.config.n_positions} positions."
            )
        self.max_model_len = max_model_len or self.config.n_positions
        self._tokenizer, self._tokenizer_error = _load_tokenizer(checkpoint)
        self._params = load_params(self._backend, checkpoint, dtype, threads)
        self._cache = self._new_cache(max_num_seqs, kv_cache_dtype)
        max_step_tokens = max(MAX_STEP_TOKENS, max_num_seqs)
        self._workspace = self._backend.new_workspace(
            self.config, max_step_tokens, max(LOGIT_ROWS, max_num_seqs), threads, dtype
        )
        self._scheduler = Scheduler(max_num_seqs, max_step_tokens)
        self._logits_row = max_num_seqs  # one more than the scheduler gives out
        self._lock = threading.RLock()  # over the scheduler, the cache and the workspace

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError if it has none that can be read."""
        self._check_open()
        if self._tokenizer is None:
            raise self._tokenizer_error
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
        params = params_list(params, 1)[0]
        if params.n != 1:
            raise RequestError(f"n is {params.n} and a stream has one sample: set n to 1, or use generate.")
        prompts = prompt_list(prompt)
        if len(prompts) != 1 and prompts:
            raise RequestError(f"{len(prompts)} prompts were given and a stream has one: use generate.")
        return self._stream(self._request(prompts[0] if prompts else prompts, params))

    def logits(self, token_ids: Any) -> np.ndarray:
        """Teacher-forced logits, (T, V) float32: row t is what the model says after token_ids[: t + 1].

        Raises RequestError for an empty list, ids outside the vocabulary or more than max_model_len ids.
        """
        self._check_open()
        is_text = isinstance(token_ids, str) and token_ids
        token_ids = self.tokenizer.encode(token_ids) if is_text else checked_ids(token_ids)
        if not token_ids:
            raise RequestError("logits need at least one token id: the list is empty.")
        token_ids = read_prompt(token_ids, self.config, lambda: self.tokenizer).token_ids
        if len(token_ids) > self.max_model_len:
            raise RequestError(
                f"{len(token_ids)} token ids were given, but "
                f"{describe_positions(self.max_model_len, self.config.n_positions)}: give at most {self.max_model_len}."
            )
        with self._lock:
            return self._all_logits(token_ids)

    def close(self) -> None:
        """Give the memory back. Any later call raises RequestError."""
        with self._lock:
            self._params = self._cache = self._workspace = self._tokenizer = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def step(self) -> None:
        """Advance every running sequence: one forward pass, one new token for each that is not still in its prompt."""
        with self._lock:
            self._check_open()
            chunks = self._scheduler.schedule()
            if chunks:  # none: another thread's step has finished everything
                self._step(chunks)

    def _step(self, chunks: list[Chunk]) -> None:
        batch = Batch.of(
            [chunk.sequence.next_token_ids(chunk.count) for chunk in chunks],
            [chunk.sequence.num_cached for chunk in chunks],
            [chunk.sequence.row for chunk in chunks],
            [chunk.is_sampled for chunk in chunks],
        )
        logits = self._backend.forward(self._params, batch, self._cache, self._workspace)  # (R, V)
        sampled = [chunk.sequence for chunk in chunks if chunk.is_sampled]
        for chunk in chunks:
            chunk.sequence.num_cached += chunk.count
        if sampled:
            self._append_tokens(sampled, logits)
        self._scheduler.finish_step()

    def _append_tokens(self, sequences: list[Sequence], logits: np.ndarray) -> None:
        """Draw each sequence's next token from its row of logits (R, V)."""
        params = [s.params for s in sequences]
        token_ids = self._backend.sample(
            logits,
            np.array([p.temperature for p in params]),
            np.array([p.top_k for p in params]),
            np.array([p.top_p for p in params]),
            np.array([s.seed for s in sequences], np.uint64),
            np.array([s.index for s in sequences]),
            np.array([len(s) for s in sequences]),
        )  # (R,)
        for sequence, row, token_id in zip(sequences, logits, token_ids.tolist(), strict=True):
            if token_id < 0:
                sequence.fail(NOT_FINITE.format(len(sequence) - 1))
                continue
            if sequence.params.logprobs is not None:
                sequence.add_logprobs(*self._backend.top_logprobs(row, token_id, sequence.params.logprobs), token_id)
            sequence.append(token_id)

    def _run(self, requests: list[_Request]) -> Iterator[tuple[int, RequestOutput]]:
        pending = dict(enumerate(requests))
        try:
            for request in requests:
                self._add(request)
            while pending:
                self.step()
                yield from self._take_finished(pending)
        finally:
            for request in pending.values():
                self._remove(request)

    def _stream(self, request: _Request) -> Iterator[StreamChunk]:
        sequence = request.sequences[0]
        sequence.chunks = []
        try:
            self._add(request)
            is_finished = False
            while not is_finished:
                self.step()
                with self._lock:  # another thread's step may be adding to them
                    chunks, sequence.chunks = sequence.chunks, []
                    is_finished = sequence.is_finished
                yield from chunks
            request.raise_error()
        finally:
            self._remove(request)

    def _take_finished(self, pending: dict[int, _Request]) -> list[tuple[int, RequestOutput]]:
        """Remove what has finished from `pending`; its outputs, with their indices."""
        with self._lock:  # another thread's step may be finishing them
            # A long list is not looked through at every step: the few that have started stand first. One that
            # overtook the others is seen as soon as they have started too.
            started = itertools.takewhile(lambda item: item[1].is_started, pending.items())
            finished = [i for i, request in started if request.is_finished]
            return [(i, pending.pop(i).output()) for i in finished]

    def _request(self, prompt: Any, params: SamplingParams) -> _Request:
        """Check everything about a prompt and its parameters; RequestError if it cannot be served."""
        self._check_open()
        prompt = read_prompt(prompt, self.config, lambda: self.tokenizer)
        check_length(len(prompt.token_ids), params.max_tokens, self.max_model_len, self.config.n_positions)
        if params.stop and self._tokenizer is None:
            raise RequestError(f"stop strings need a tokenizer: {self._tokenizer_error} Use stop_token_ids.")
        seed = params.seed if params.seed is not None else secrets.randbelow(MAX_SEED + 1)
        eos = frozenset(self.config.eos_token_ids)
        sequences = [
            Sequence(prompt.token_ids, params, seed, index, eos, self._text_stream(params)) for index in range(params.n)
        ]
        return _Request(prompt, params, sequences)

    def _new_cache(self, max_num_seqs: int, dtype: str) -> Any:
        sizes = self.config, max_num_seqs + 1, self.max_model_len, dtype
        try:
            return self._backend.new_cache(*sizes)
        except MemoryError:
            raise RequestError(
                f"the KV cache for max_num_seqs={max_num_seqs} and {self.max_model_len} positions takes "
                f"{self._backend.cache_bytes(*sizes) / 2**30:.1f} GiB, which this machine cannot give: lower "
                "max_num_seqs or max_model_len."
            ) from None

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        return None if self._tokenizer is None else TextStream(self._tokenizer.detokenizer(), params.stop)

    def _add(self, request: _Request) -> None:
        with self._lock:
            for sequence in request.sequences:
                self._scheduler.add(sequence)

    def _remove(self, request: _Request) -> None:
        with self._lock:
            for sequence in request.sequences:
                self._scheduler.remove(sequence)

    def _all_logits(self, token_ids: list[int]) -> np.ndarray:
        parts = []
        for start in range(0, len(token_ids), LOGIT_ROWS):
            batch = Batch.of([token_ids[start : start + LOGIT_ROWS]], [start], [self._logits_row], "all")
            parts.append(self._backend.forward(self._params, batch, self._cache, self._workspace).copy())
        return np.concatenate(parts)  # (T, V)

    def _check_open(self) -> None:
        if self._params is None:
            raise RequestError("this LLM has been closed: make a new one.")


def _completion(sequence: Sequence) -> CompletionOutput:
    wants_logprobs = sequence.params.logprobs is not None
    return CompletionOutput(
        index=sequence.index,
        text=None if sequence.text is None else sequence.text.text,
        token_ids=sequence.new_token_ids,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=sequence.logprobs if wants_logprobs else None,
        cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
        seed=sequence.seed,
    )


def _load_tokenizer(checkpoint: Checkpoint | PackedCheckpoint) -> tuple[Tokenizer | None, CheckpointError | None]:
    """The tokenizer, or the reason why there is none: token ids work without one."""
    try:
        return Tokenizer.from_folder(checkpoint.path), None
    except CheckpointError as error:
        return None, error


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r} and must be a whole number, 1 or more.")
