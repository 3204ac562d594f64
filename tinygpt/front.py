"""Front: the calls that an LLM and a RemoteLLM take alike."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from .engine.prompts import Params, Prompts, PromptType, pairs_of, params_or_fields, prompt_list
from .errors import OfOneProcess, TinyGPTError, invalid
from .outputs import OnChunk, RequestOutput, StreamChunk, ThreadFuture, UseTqdm, in_order
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .sampling_keywords import SamplingKeywords

AnyFront = TypeVar("AnyFront", bound="Front")
AnyFuture = TypeVar("AnyFuture", bound=ThreadFuture[RequestOutput])
AnyError = TypeVar("AnyError", bound=TinyGPTError)


class Front(OfOneProcess, Generic[AnyFuture, AnyError]):
    """The calls that make text: they read prompts and params, which a subclass checks and runs.

    AnyFuture: what `submit` returns. AnyError: what a request that fails has in place of its output.
    """

    close: Callable[[], None]
    _generate: Callable[..., Iterator[tuple[int, RequestOutput | AnyError]]]
    _stream: Callable[..., Iterator[StreamChunk]]
    _submit: Callable[..., AnyFuture]

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        use_tqdm: UseTqdm = None,
        **fields: "Unpack[SamplingKeywords]",
    ) -> list[RequestOutput]:
        """Continue each prompt, and return the outputs in the prompts' order.

        prompts: a text, a list of texts or of lists of token ids, of {"prompt": text or ids} or {"prompt_token_ids":
            ids}. An empty prompt starts at BOS.
        params: one SamplingParams, or one for each prompt. fields: of one SamplingParams in place of params, as in
            generate("Once", max_tokens=8); all methods that take params take fields.
        use_tqdm: whether a bar counts finished prompts; None is for several prompts on a terminal or in a notebook. A
            function replaces tqdm, as in vLLM.
        Raise RequestError, of an LLM before any work, if a prompt cannot be served, and FailedRequestError if a request
        fails; either ends the others. Ctrl-C ends the call's requests.
        """
        prompts = prompt_list(prompts)
        finished = self.generate_as_finished(prompts, params, **fields)
        return in_order(finished, len(prompts), use_tqdm)

    def generate_as_finished(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        return_exceptions: bool = False,
        **fields: "Unpack[SamplingKeywords]",
    ) -> Iterator[tuple[int, RequestOutput | AnyError]]:
        """Yield (index of the prompt, output) as prompts finish, for `generate`'s arguments.

        return_exceptions: yield the error of a failed request in place of its output, and go on with the others.
        An LLM checks all prompts when this is called. Closing the iterator ends the requests.
        """
        return self._generate(pairs_of(prompts, params, fields), return_exceptions)

    def stream(
        self, prompt: PromptType, params: SamplingParams | None = None, **fields: "Unpack[SamplingKeywords]"
    ) -> Iterator[StreamChunk]:
        """Continue one prompt, checked at the call, token by token.

        Closing the iterator ends the request.
        A chunk's text never ends inside a character; a sample's chunks together are its text, tokens and logprobs in
        `generate`. Chunks of n samples come mixed, each with its index.
        """
        return self._stream(prompt, params_or_fields(params, fields))

    def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | None = None,
        on_chunk: OnChunk | None = None,
        **fields: "Unpack[SamplingKeywords]",
    ) -> AnyFuture:
        """Continue one prompt in the background.

        Cancelling the future frees the request's memory within a step.
        on_chunk: called with each StreamChunk by another thread: an LLM's engine, which waits for it. It may submit
            requests, but not run them.
        Raise, of an LLM before any work, RequestError if the prompt cannot be served, QueueFullError if max_queue
        samples wait. A RemoteLLM's future raises them.
        """
        if on_chunk is not None and not callable(on_chunk):
            raise invalid("on_chunk", on_chunk, "a function of one StreamChunk")
        return self._submit(prompt, params_or_fields(params, fields), on_chunk)

    def __enter__(self: "AnyFront") -> "AnyFront":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
