"""Streams of text from token ids: detokenizers, and a text that ends at the first stop string."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """All texts pushed out, with what `finish` gives, are decode(ids, skip_special_tokens=True)."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: never part of a character, and often nothing."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """As `push` of one after another."""

    def finish(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that was never completed."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: UTF-8 decoded as the bytes arrive."""

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PrefixDetokenizer:
    """For any other tokenizer: decodes all ids so far at each step, and gives what is new.

    That is quadratic in the length, and right for decoders that look at neighbouring tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_plain: Callable[[int], bool]):
        self._decode = decode
        self._is_plain = is_plain
        self._ids: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        # A run of byte tokens becomes characters only if all of it is UTF-8, so it waits for its end, which
        # no token is that gives no text.
        if not self._is_plain(token_id):
            return ""
        return self._new(self._decode(self._ids).rstrip("\ufffd"))

    def push_all(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._ids += token_ids[:-1]  # what they complete comes with the last, or after it
        return self.push(token_ids[-1])

    def finish(self) -> str:
        return self._new(self._decode(self._ids))

    def _new(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new


class TextStream:
    """`text` grows by what `push` and `finish` return, and is never taken back.

    stop: the strings that end the text. They are cut off unless is_stop_included. One that is complete within the text
    of the first min_tokens tokens ends nothing; one that only begins there does.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], is_stop_included: bool = False, min_tokens: int = 0
    ):
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop, is_stop_included)
        self._num_early = min_tokens  # tokens to come with which no stop string may be complete
        self._is_early = False  # whether the last token was one of them
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
        self._is_early = self._num_early > 0
        self._num_early -= self._is_early
        return self._give(self._stop_strings.push(self._detokenizer.push(token_id), self._is_early))

    def push_later(self, token_id: int) -> None:
        """Take a token whose text is not needed before `finish`, where no string ends the text."""
        self._later.append(token_id)

    def finish(self) -> str:
        """The text that was waiting, when no more tokens come."""
        later, self._later = self._later, []
        text = self._stop_strings.push(self._detokenizer.push_all(later) + self._detokenizer.finish(), self._is_early)
        return self._give(text + self._stop_strings.finish())

    def _give(self, text: str) -> str:
        self._parts.append(text)
        return text


class StopStrings:
    """Lets text through up to the first stop string, however the text is cut.

    The first is the one that is complete first, as generation would have ended there; of two that are
    complete at one character, the longer, so that no part of it is left. `matched` then names it. Text that
    may be the beginning of a stop string waits: what is given is always a prefix of the final text.
    is_included: the stop string itself is let through too.
    """

    def __init__(self, stop: Sequence[str], is_included: bool = False):
        self._stop = tuple(stop)
        self._is_included = is_included
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, is_early: bool = False) -> str:
        """The text that is now safe to give; after a match, nothing. is_early: no stop string may be complete in it."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        num_seen, text = len(self._held), self._held + text
        found = [] if is_early else self._complete_behind(num_seen, text)
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[:end] if self._is_included else text[: end - len(self.matched)]
        safe = len(text) - self._unsettled(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text that was waiting, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _complete_behind(self, num_seen: int, text: str) -> list[tuple[int, int, str]]:
        """(end, minus its length, stop string) of each that is in `text` with more than the first num_seen characters.

        Whatever is complete among those was too early.
        """
        starts = ((text.find(stop, max(num_seen + 1 - len(stop), 0)), stop) for stop in self._stop)
        return [(start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0]

    def _unsettled(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
