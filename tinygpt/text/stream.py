"""Streams of text from token ids: detokenizers and stop strings."""

import codecs
from collections.abc import Callable, Sequence


class ByteDetokenizer:
    """An incremental UTF-8 decoder. All texts joined are decode(ids, True)."""

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that a token completes, often none."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """Return the text of further tokens, with U+FFFD for an incomplete character."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)), final=True)


class PrefixDetokenizer:
    """A detokenizer that decodes all ids at each step, for decoders that join neighbors."""

    def __init__(self, decode: Callable[[list[int]], str], is_plain: Callable[[int], bool]):
        self._decode = decode
        self._is_plain = is_plain
        self._ids: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        # A run of byte tokens becomes characters only if all of it is UTF-8.
        if not self._is_plain(token_id):
            return ""
        return self._new(self._decode(self._ids).rstrip("\ufffd"))

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        self._ids += token_ids
        return self._new(self._decode(self._ids))

    def _new(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new


Detokenizer = ByteDetokenizer | PrefixDetokenizer


class TextStream:
    """A text that grows by the results of `push` and `finish`.

    stop: strings that end the text, cut off unless is_stop_included, and ignored within the first min_tokens tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        is_stop_included: bool = False,
        min_tokens: int = 0,
    ):
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop, is_stop_included)
        self._num_early = min_tokens  # next tokens after which stop strings are ignored
        self._is_early = False
        self._parts: list[str] = []
        self._later: list[int] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def stop(self) -> str | None:
        return self._stop_strings.matched

    def push(self, token_id: int) -> str:
        self._is_early = self._num_early > 0
        self._num_early -= self._is_early
        return self._give(self._stop_strings.push(self._detokenizer.push(token_id), self._is_early))

    def push_later(self, token_id: int) -> None:
        """Add a token for `finish`, without stop strings."""
        self._later.append(token_id)

    def finish(self) -> str:
        later, self._later = self._later, []
        text = self._stop_strings.push(self._detokenizer.finish(later), self._is_early)
        return self._give(text + self._stop_strings.finish())

    def _give(self, text: str) -> str:
        self._parts.append(text)
        return text


class StopStrings:
    """Passes text up to the first stop string, and holds back text that may begin one.

    `matched`: the stop string that is complete first, the longer of two that end together.
    """

    def __init__(self, stop: Sequence[str], is_included: bool = False):
        self._stop = tuple(stop)
        self._is_included = is_included
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, is_early: bool = False) -> str:
        """Return the certain text. is_early: ignore stop strings complete in `text`."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        num_seen = len(self._held)
        text = self._held + text
        complete = [] if is_early else self._complete_behind(num_seen, text)
        if complete:
            end, _, self.matched = min(complete)
            self._held = ""
            return text[:end] if self._is_included else text[: end - len(self.matched)]
        safe = len(text) - self._unsettled(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _complete_behind(self, num_seen: int, text: str) -> list[tuple[int, int, str]]:
        starts = ((text.find(stop, max(num_seen + 1 - len(stop), 0)), stop) for stop in self._stop)
        return [(start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0]

    def _unsettled(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
