"""Session: a text that the user and the model write in turns."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..engine.prompts import PromptType, params_or_fields, text_or_ids
from ..errors import OfOneProcess, RequestError, closed
from ..fields import integer, read_field
from ..outputs import RequestOutput, StreamChunk
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..sampling_keywords import SamplingKeywords


class Session(OfOneProcess):
    """Token ids, and calls that add to them, with the LLM's output for all of them to the bit.

    If other samples evict its keys and values from the prefix cache, the next call reads all tokens again. A session is
    for one thread at a time; several may run at once.
    """

    _instead = "call fork(), or extend a session of another process by its token_ids"

    def __init__(self, llm: Any, token_ids: list[int]):
        """Begin with these tokens. llm: the LLM that `session` was called on."""
        self._llm = llm
        self._tokens: list[int] | None = token_ids  # replaced by each change but a stream's; None: closed

    @property
    def token_ids(self) -> list[int]:
        """Return a copy of all tokens so far, with tokens that ended samples."""
        return list(self._open_tokens())

    @property
    def text(self) -> str:
        """Return the text of all tokens so far, with stop strings and without special tokens."""
        return self._llm.tokenizer.decode(self.token_ids, skip_special_tokens=True)

    def __repr__(self) -> str:
        return "Session(closed)" if self._tokens is None else f"Session({len(self)} tokens)"

    def __len__(self) -> int:
        return len(self._tokens or ())

    def extend(self, addition: PromptType, split_special_tokens: bool | None = None) -> None:
        """Add a text, encoded by itself, or token ids, or a prompt's dict.

        split_special_tokens: None is the LLM's.
        """
        tokens = self._open_tokens()
        addition = text_or_ids(addition)
        if addition:  # an empty prompt would be BOS
            self._tokens = tokens + self._llm.read_prompt(addition, split_special_tokens).token_ids

    def generate(
        self, params: SamplingParams | None = None, **fields: "Unpack[SamplingKeywords]"
    ) -> RequestOutput:
        """Continue the text, and add the sample. An empty session begins at BOS.

        Raise what LLM.generate raises, and RequestError for several samples; then nothing is added.
        """
        params = self._checked(params_or_fields(params, fields))
        (output,) = self._llm.generate([self._llm.read_prompt(self._tokens)], params)
        self._tokens = output.prompt_token_ids + output.outputs[0].token_ids
        return output

    def stream(
        self, params: SamplingParams | None = None, **fields: "Unpack[SamplingKeywords]"
    ) -> Iterator[StreamChunk]:
        """Continue the text, token by token. Closing the iterator keeps the tokens so far.

        Raise RequestError, also from the iterator, after another change of the session.
        """
        params = self._checked(params_or_fields(params, fields))
        tokens = self._open_tokens()
        prompt = self._llm.read_prompt(tokens)
        return self._stream(self._llm.stream(prompt, params), tokens, prompt.token_ids)

    def fork(self) -> "Session":
        return Session(self._llm, self.token_ids)

    def rewind(self, position: int) -> None:
        """Remove all tokens from `position` on."""
        tokens = self._open_tokens()
        is_within = integer(0, len(tokens), ", the session's tokens")
        self._tokens = tokens[: read_field("position", position, is_within)]

    def close(self) -> None:
        """Forget the tokens. Later calls raise RequestError."""
        self._tokens = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _stream(
        self, chunks: Iterator[StreamChunk], before: list[int], prompt: list[int]
    ) -> Iterator[StreamChunk]:
        try:
            self._check_unchanged(before)
            self._tokens = mine = list(prompt)
            for chunk in chunks:
                self._check_unchanged(mine)
                if chunk.token_id is not None:
                    mine.append(chunk.token_id)
                yield chunk
        finally:
            chunks.close()

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        self._open_tokens()
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams) and params.n != 1:
            raise RequestError(
                f"n is {params.n} and a session goes on with one sample: set n to 1, or fork it."
            )
        return params

    def _check_unchanged(self, tokens: list[int]) -> None:
        if self._tokens is not tokens:
            raise RequestError(
                "the session was changed while it streamed: read the stream first, or close it."
            )

    def _open_tokens(self) -> list[int]:
        if self._tokens is None:
            raise closed("session")
        return self._tokens
