"""Session: a text that the user and the model write in turns, and whose context stays computed."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinygpt.errors import RequestError
from tinygpt.outputs import RequestOutput, StreamChunk
from tinygpt.request.prompts import Prompt, checked_ids, params_or_fields, unsalted
from tinygpt.sampling_params import SamplingParams

if TYPE_CHECKING:  # LLM makes sessions
    from tinygpt.llm import LLM


class Session:
    """Token ids, and calls that add to them. What a call generates is what the LLM makes of all of them, to the bit.

    Keys and values are kept where those of all ended samples are: in the LLM's prefix cache, of which the sessions that
    were used last have theirs. Of any other, the next call reads all tokens again: later, but the same.
    A session is for one thread at a time. Several may run at once, and share the LLM's steps.
    """

    def __init__(self, llm: "LLM", token_ids: list[int], cache_salt: Hashable = None):
        self._llm = llm
        self._cache_salt = cache_salt  # of all its requests
        self._token_ids = token_ids  # another list after each change but those of a stream
        self._is_closed = False

    @property
    def token_ids(self) -> list[int]:
        """A copy of all tokens so far, those that ended samples included."""
        self._check_open()
        return list(self._token_ids)

    @property
    def text(self) -> str:
        """The text of all tokens so far, that of stop strings included; special tokens have none."""
        return self._llm.tokenizer.decode(self.token_ids, skip_special_tokens=True)

    def __repr__(self) -> str:
        return "Session(closed)" if self._is_closed else f"Session({len(self)} tokens)"

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, addition: Any, split_special_tokens: bool | None = None) -> None:
        """Add a text or token ids, also as {"prompt": text} or {"prompt_token_ids": ids}.

        A text is encoded by itself: no token spans its border with what was before.
        split_special_tokens: as for LLM.read_prompt.
        """
        self._check_open()
        if isinstance(addition, dict):
            if "cache_salt" in addition:
                raise RequestError("cache_salt is a whole session's: give it to llm.session, and leave it out here.")
            addition, _ = unsalted(addition, None)
        addition = addition if isinstance(addition, str) else checked_ids(addition)
        if addition:  # an empty prompt would be BOS
            added = self._llm.read_prompt(addition, split_special_tokens).token_ids
            self._token_ids = self._token_ids + added

    def generate(self, params: SamplingParams | None = None, **fields: Any) -> RequestOutput:
        """Go on from here. The sample joins the session; if there are several, RequestError.

        Raises what LLM.generate raises, and nothing is added then. An empty session begins at BOS.
        """
        params = self._checked(params_or_fields(params, fields))
        (output,) = self._llm.generate([self._prompt()], params)
        self._token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        return output

    def stream(self, params: SamplingParams | None = None, **fields: Any) -> Iterator[StreamChunk]:
        """As LLM.stream. Each token joins the session as its chunk is given: closing the iterator keeps those.

        RequestError, from the iterator too, once the session has been changed by anything else.
        """
        params = self._checked(params_or_fields(params, fields))
        prompt = self._prompt()
        chunks = self._llm.stream(prompt, params)
        return self._stream(chunks, self._token_ids, prompt.token_ids, params)

    def fork(self) -> "Session":
        """Another session with the same tokens so far, which goes its own way from here."""
        self._check_open()
        other = Session(self._llm, list(self._token_ids), self._cache_salt)
        return other

    def rewind(self, position: int) -> None:
        """Take back all tokens from `position` on."""
        self._check_open()
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= len(self._token_ids):
            raise RequestError(
                f"position is {position!r} and the session has {len(self._token_ids)} tokens: give a whole number from "
                "0 to that."
            )
        self._token_ids = self._token_ids[:position]

    def close(self) -> None:
        """Forget the tokens; any later call raises RequestError. Keys and values go when others need their place."""
        self._token_ids, self._is_closed = [], True

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _prompt(self) -> Prompt:
        """All tokens, to go on from; BOS where there are none."""
        return replace(self._llm.read_prompt(self._token_ids), cache_salt=self._cache_salt)

    def _stream(
        self, chunks: Iterator[StreamChunk], before: list[int], prompt: list[int], params: SamplingParams
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
            raise RequestError(f"n is {params.n} and a session goes on with one sample: set n to 1, or fork it.")
        return params

    def _check_unchanged(self, token_ids: list[int]) -> None:
        if self._token_ids is not token_ids:
            raise RequestError("the session was changed while it streamed: read the stream first, or close it.")

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this session has been closed: make a new one.")
