"""TextStream: a sequence's text as it becomes certain: detokenised, and cut at the first stop string."""

from collections.abc import Sequence

from tinygpt.tokenizer.detokenizer import Detokenizer, StopStrings


class TextStream:
    """`text` grows by what `push` and `finish` return, and is never taken back.

    stop: the strings that end the text. They are cut off it, unless is_stop_included, and not looked for in the text
    of the first min_tokens tokens.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], is_stop_included: bool = False, min_tokens: int = 0
    ):
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop, is_stop_included)
        self._tokens_to_skip = min_tokens
        self._parts: list[str] = []
        self._later: list[int] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stop_strings.matched

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        text = self._detokenizer.push(token_id)
        if self._tokens_to_skip:
            self._tokens_to_skip -= 1
            return self._give(text)
        return self._give(self._stop_strings.push(text))

    def push_later(self, token_id: int) -> None:
        """Take a token of which nobody wants to know anything before `finish`, where no string ends the text."""
        self._later.append(token_id)

    def finish(self) -> str:
        """The text that was waiting, when no more tokens come."""
        later, self._later = self._later, []
        text = self._stop_strings.push(self._detokenizer.push_all(later) + self._detokenizer.finish())
        return self._give(text + self._stop_strings.finish())

    def _give(self, text: str) -> str:
        self._parts.append(text)
        return text
