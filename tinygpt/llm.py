"""LLM: from prompts to text."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from .engine.engine import Engine, RequestFuture
from .engine.input_processor import InputProcessor
from .engine.model_runner import ModelRunner, ModelSource, load_backend
from .engine.prompts import (
    Params,
    Prompt,
    Prompts,
    PromptType,
    params_list,
    prompt_list,
)
from .engine.sequence import Request
from .errors import FailedRequestError, RequestError, TinyGPTError
from .front import Front
from .hardware import thread_count
from .llm_args import LLMArgs, takes_fields_of
from .look import LAST_HIDDEN_STATE
from .look.methods import LookMethods, points_of
from .outputs import (
    Classification,
    ContinuationScore,
    OnChunk,
    RequestOutput,
    StreamChunk,
    UseTqdm,
    as_finished,
    in_order,
    until_done,
)
from .sampling_params import SamplingParams
from .text.tokenizer import Tokenizer
from .weights.config import dtype_name

if TYPE_CHECKING:  # `generate` has no use for them
    from typing_extensions import Unpack

    from .look.edits import EditsType
    from .ranks.lead import Ranks
    from .sampling_keywords import SamplingKeywords
    from .text.chat import Template
    from .text.session import Session

logger = logging.getLogger(__name__)

# Requests that reach all kernels, each of a kind that clients send: greedy, sampled, one with rarer rules, a text with
# its log probabilities, its first token's for `echo`.
WARMUP_REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
    {
        "temperature": 1.0,
        "typical_p": 0.9,
        "presence_penalty": 0.5,
        "logprobs": 1,
        "logprobs_mode": "processed",
    },
    {"logprobs": 1, "prompt_logprobs": 1},
    {"prompt_logprobs": -1},
)


class LLM(Front[RequestFuture, FailedRequestError], LookMethods):
    """A GPT-2 checkpoint, ready to generate.

    Raise CheckpointError if the checkpoint cannot be loaded, RequestError for an impossible argument.
    Results do not depend on threads, these sizes or other requests, to the last bit. Python threads share the LLM's
    steps; a forked child makes its own LLM.
    """

    @takes_fields_of(LLMArgs)
    def __init__(self, args: LLMArgs):
        ranks = _ranks(args)
        num_threads = thread_count(args.threads) if ranks is None else ranks.threads(args.threads)
        source = ModelSource.open(args)
        engine_config = args.sizes(source.config, source.backend.MAX_STEP_TOKENS)
        self._args = args
        self.lora_modules = tuple(args.lora_modules or ())
        self.config = source.config
        self.dtype = source.dtype
        self.max_model_len = engine_config.max_model_len
        self.checkpoint_path = source.checkpoint.folder
        self._chat_options = source.checkpoint.chat_options
        if args.chat_template is not None:
            _ = self.chat_template  # RequestError for a file that is none
        self._classifier = None
        if source.checkpoint.heads:
            from .engine.classifier import read_heads

            self._classifier, note = read_heads(source.checkpoint)
            logger.warning(note)
        draft_model = None
        if args.draft_model is not None:
            from .engine.spec_decode import DraftModel

            draft_model = DraftModel.open(args, source, engine_config, num_threads)
        points = points_of(source, args, None if ranks is None else ranks.seen)
        self._inputs = InputProcessor(source, args, engine_config, points, ranks is None, draft_model)
        if ranks is None:
            runner = ModelRunner(source, engine_config, num_threads)
        else:
            runner = ranks.new_runner(source, args, engine_config)
        to_close = [] if draft_model is None else [draft_model]
        self.engine = Engine(runner, engine_config, owner=self, to_close=to_close)

    def __repr__(self) -> str:
        state = "closed" if self.engine.is_closed else f"max_model_len={self.max_model_len}"
        args = self._args
        return (
            f"LLM({args.checkpoint!r}, dtype={self.dtype!r}, device={args.device!r}, "
            f"max_num_seqs={args.max_num_seqs}, {state})"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raise NoTokenizerError if none runs here, CheckpointError if it is damaged."""
        self.engine.check_open()
        return self._inputs.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """Return `tokenizer`, as vLLM's method does."""
        return self.tokenizer

    @cached_property
    def chat_template(self) -> "Template | None":
        """The template of `chat`, None if there is none. Raise CheckpointError if the checkpoint's is damaged."""
        from .text.chat import open_template

        return open_template(self._args.chat_template, self.checkpoint_path, self._chat_options)

    def read_prompt(self, prompt: PromptType, split_special_tokens: bool | None = None) -> Prompt:
        """Encode and check a text or token ids, for any call that takes a prompt.

        split_special_tokens: None is the LLM's.
        """
        self.engine.check_open()
        return self._inputs.read_prompt(prompt, split_special_tokens)

    def chat(
        self,
        messages: Any,
        params: Params = None,
        *,
        use_tqdm: UseTqdm = None,
        **fields: "Unpack[SamplingKeywords]",
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, as `generate` continues prompts.

        messages: [{"role": "user", "content": text}, ...], which the chat template makes a prompt.
        Raise RequestError without a template: LLM(chat_template="plain") is for any model.
        """
        from .text.chat import conversations

        prompts = [self.read_messages(conversation) for conversation in conversations(messages)]
        return self.generate(prompts, params, use_tqdm=use_tqdm, **fields)

    def read_messages(self, messages: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
        """Return the prompt of one conversation, for `stream` and `submit`. Texts cannot write special tokens.

        chat_template_kwargs: further variables of the template.
        """
        from .text.chat import chat_ids, conversations

        self.engine.check_open()
        if self.chat_template is None:
            raise RequestError('this model has no chat template: give LLM(chat_template="plain"), or a file.')
        (conversation,) = conversations([messages])
        return self.read_prompt(
            chat_ids(self.chat_template, self.tokenizer, conversation, chat_template_kwargs)
        )

    def num_truncated_tokens(self, prompt: PromptType, params: SamplingParams | None = None) -> int:
        """Return how many tokens at the prompt's beginning its overflow would leave out."""
        self.engine.check_open()
        return self._inputs.num_truncated_tokens(_single_prompt(prompt), params_list(params, 1)[0])

    def num_virtual_tokens(self, soft_prompt: str | None) -> int:
        """Return how many positions the soft prompt takes; 0 for None."""
        self.engine.check_open()
        return self._inputs.num_virtual_tokens(soft_prompt)

    def session(self) -> "Session":
        """Return an empty session: each turn computes its new tokens alone."""
        from .text.session import Session

        self.engine.check_open()
        return Session(self, [])

    def classify(self, prompts: Prompts) -> list[Classification]:
        """Return the labels of each prompt by the head of a GPT2ForSequenceClassification, or ForTokenClassification.

        prompts: texts or lists of token ids.
        Raise RequestError, before any work, for a checkpoint without such a head, and as `logits` does.
        """
        return self._results(self._classifying_requests(prompts))

    def _classifying_requests(self, prompts: Prompts) -> list[Request]:
        """Return a request for the Classification of each prompt. Raise RequestError."""
        self.engine.check_open()
        if self._classifier is None:
            raise RequestError(
                "this model has no head that classifies: give a GPT2ForSequenceClassification or "
                "GPT2ForTokenClassification, not converted."
            )
        return self._reading_requests(
            "classes", prompt_list(prompts), LAST_HIDDEN_STATE, self._classifier.label
        )

    def score(
        self,
        prompt: PromptType,
        continuations: Prompts,
        soft_prompt: str | None = None,
        split_special_tokens: bool | None = None,
        edits: "EditsType" = (),
    ) -> list[ContinuationScore]:
        """Score each continuation of the prompt, and its tokens and words, by the model's own probabilities.

        prompt, continuations: texts or token ids. An empty prompt is the BOS token; it is read once.
        As in evaluation harnesses, white space at the prompt's end belongs to each continuation, and prompt and
        continuation are encoded together; apart, if that changes the prompt's tokens, or if either is token ids.
        soft_prompt: the name of a soft prompt before the prompt. split_special_tokens: None is the LLM's.
        edits: an Edit or a list of them, whose "new" is after the prompt.
        Raise RequestError, before any work, if a continuation is empty or too long.
        """
        requests = self._scoring_requests(prompt, continuations, soft_prompt, split_special_tokens, edits)
        return self._results(requests)

    def _scoring_requests(self, *arguments: Any) -> list[Request]:
        """Return a request for the ContinuationScore of each continuation, of `score`'s arguments."""
        self.engine.check_open()
        return self._inputs.scoring_requests(*arguments)

    def check_health(self) -> None:
        """Raise TinyGPTError if the engine's last step failed, RequestError once the LLM is closed."""
        self.engine.check_health()

    def close(self) -> None:
        """Free the memory. Later calls and unfinished futures raise RequestError.

        A call from within a step, such as on_chunk's, raises RequestError and closes nothing.
        """
        self.engine.close()
        self._inputs.close()

    def _generate(
        self, pairs: Iterable[tuple[PromptType, SamplingParams]], return_exceptions: bool
    ) -> Iterator[tuple[int, RequestOutput | FailedRequestError]]:
        self.engine.check_open()
        return self._run([self._inputs.request(*pair) for pair in pairs], return_exceptions)

    def _run(
        self, requests: list[Request], return_exceptions: bool = False
    ) -> Iterator[tuple[int, RequestOutput | FailedRequestError]]:
        self.engine.refuse_own_thread()
        futures = [RequestFuture(request) for request in requests]
        return as_finished(
            futures, partial(self.engine.submit, futures), return_exceptions, FailedRequestError
        )

    def _results(self, requests: list[Request]) -> list:
        return in_order(self._run(requests), len(requests), use_tqdm=False)

    def _submit(
        self, prompt: PromptType, params: SamplingParams | None, on_chunk: OnChunk | None
    ) -> RequestFuture:
        future = RequestFuture(self._single_request(prompt, params, on_chunk))
        self.engine.submit_queued([future])
        return future

    def _stream(self, prompt: PromptType, params: SamplingParams | None) -> Iterator[StreamChunk]:
        chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()
        return self._chunks_of(self._single_request(prompt, params, chunks.put), chunks)

    def _chunks_of(self, request: Request, chunks: SimpleQueue) -> Iterator[StreamChunk]:
        self.engine.refuse_own_thread()
        future = RequestFuture(request)
        future.add_done_callback(lambda _: chunks.put(None))
        yield from until_done(chunks, future, partial(self.engine.submit, [future]))

    def _single_request(
        self, prompt: PromptType, params: SamplingParams | None, on_chunk: OnChunk | None
    ) -> Request:
        self.engine.check_open()
        params = params_list(params, 1)[0]
        if on_chunk is not None and params.num_beams > 1:
            raise RequestError(
                "asks for a search, which has no text until it ends: do not stream it.", "num_beams"
            )
        if on_chunk is not None and params.num_samples > params.n:
            reason = f"is {params.best_of} and a stream cannot choose among samples: do not stream it."
            raise RequestError(reason, "best_of", params.best_of)
        return self._inputs.request(_single_prompt(prompt), params, on_chunk)


def _ranks(args: LLMArgs) -> "Ranks | None":
    if args.num_ranks == 1:
        return None
    from .ranks.mpi import world_of

    world = world_of(args.layout)  # before anything takes long
    from .ranks.lead import join  # which imports the CPU's kernels

    return join(args.layout, world)


def _single_prompt(prompt: Prompts) -> PromptType:
    prompts = prompt_list(prompt)
    if len(prompts) > 1:
        raise RequestError(f"{len(prompts)} prompts were given and this takes one: use generate.")
    return prompts[0] if prompts else prompts


def warmup(
    model: str = "demo", dtype: str = "auto", kv_cache_dtype: str = "auto", threads: int | None = None
) -> int:
    """Compile the CPU's kernels for models of this dtype. Return how many had to compile.

    Later processes find them on the disk. The arguments are LLM's.
    Raise TinyGPTError if the kernels cannot be kept, and the errors of LLM.
    """
    from .kernels.cpu.jit import compile_times

    dtype = dtype_name(dtype)
    load_backend("cpu", dtype)  # refuse an impossible dtype before reading the weights
    before, _ = compile_times()
    with LLM(model, dtype, threads=threads, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype) as llm:
        for fields in WARMUP_REQUESTS:
            llm.generate([[0, 0]], max_tokens=2, ignore_eos=True, seed=0, **fields)
    count = compile_times()[0] - before
    if count:
        from .kernels.cpu.compiler import kernel_cache

        if not kernel_cache().is_keeping:
            raise TinyGPTError(
                "the compiled kernels could not be kept, so other processes compile them again."
            )
    return count
