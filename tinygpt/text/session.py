"""Session: a text that the user and the model write in turns."""

from collections.abc import Iterator
from typing import Any

from ..engine.prompts import Prompt, PromptType, params_or_fields, text_or_ids
from ..errors import RequestError
from ..fields import integer, read_field
from ..outputs import RequestOutput, StreamChunk
from ..sampling_params import SamplingParams


class Session:
    """Token ids, and calls that add to them, with the LLM's output for all of them to the bit.

    If other samples evict its keys and values from the prefix cache, the next call reads all tokens again. A session is
    for one thread at a time; several may run at once.
    """

    def __init__(self, llm: Any, token_ids: list[int]):
        """llm: the LLM that `session` was called on."""
        self._llm = llm
        self._token_ids = token_ids  # replaced by each change but a stream's
        self._is_closed = False

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens so far, with tokens that ended samples."""
        self._check_open()
        return list(self._token_ids)

    @property
    def text(self) -> str:
        """The text of all tokens so far, with stop strings and without special tokens."""
        return self._llm.tokenizer.decode(self.token_ids, skip_special_tokens=True)

    def __repr__(self) -> str:
        return "Session(closed)" if self._is_closed else f"Session({len(self)} tokens)"

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, addition: PromptType, split_special_tokens: bool | None = None) -> None:
        """Add a text, encoded by itself, or token ids, or a prompt's dict.

        split_special_tokens: None is the LLM's.
        """
        self._check_open()
        addition = text_or_ids(addition)
        if addition:  # an empty prompt would be BOS
            added = self._llm.read_prompt(addition, split_special_tokens).token_ids
            self._token_ids = self._token_ids + added

    def generate(self, params: SamplingParams | None = None, **fields: Any) -> RequestOutput:
        """Continue the text, and add the sample. An empty session begins at BOS.

        Raise what LLM.generate raises, and RequestError for several samples; then nothing is added.
        """
        params = self._checked(params_or_fields(params, fields))
        (output,) = self._llm.generate([self._prompt()], params)
        self._token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        return output

    def stream(self, params: SamplingParams | None = None, **fields: Any) -> Iterator[StreamChunk]:
        """Continue the text, token by token. Closing the iterator keeps the tokens so far.

        Raise RequestError, also from the iterator, after another change of the session.
        """
        params = self._checked(params_or_fields(params, fields))
        prompt = self._prompt()
        chunks = self._llm.stream(prompt, params)
        return self._stream(chunks, self._token_ids, prompt.token_ids)

    def fork(self) -> "Session":
        self._check_open()
        return Session(self._llm, list(self._token_ids))

    def rewind(self, position: int) -> None:
        """Remove all tokens from `position` on."""
        self._check_open()
        is_within = integer(0, len(self._token_ids), ", the session's tokens")
        self._token_ids = self._token_ids[: read_field("position", position, is_within)]

    def close(self) -> None:
        """Forget the tokens. Later calls raise RequestError."""
        self._token_ids, self._is_closed = [], True

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _prompt(self) -> Prompt:
        return self._llm.read_prompt(self._token_ids)

    def _stream(
        self, chunks: Iterator[StreamChunk], before: list[int], prompt: list[int]
    ) -> Iterator[StreamChunk]:
        try:
            self._check_unchanged(before)
            self._token_ids = mine = list(prompt)
            for chunk in chunks:
                self._check_unchanged(mine)
                if chunk.token_id is not None:
                    mine.append(chunk.token_id)
                yield chunk
        finally:
            chunks.close()

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        self._check_open()
        params = SamplingParams() if params is None else params
        if isinstance(params, SamplingParams) and params.n != 1:
            raise RequestError(
                f"n is {params.n} and a session goes on with one sample: set n to 1, or fork it."
            )
        return params

    def _check_unchanged(self, token_ids: list[int]) -> None:
        if self._token_ids is not token_ids:
            raise RequestError(
                "the session was changed while it streamed: read the stream first, or close it."
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this session has been closed: make a new one.")
