"""Exceptions that a user can act on, and sentences that several modules build."""

import reprlib
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, NoReturn

from .weights.errors import CheckpointError, LostFileError, NoTokenizerError, TinyGPTError, how_to_install

__all__ = ["CheckpointError", "LostFileError", "NoTokenizerError", "TinyGPTError", "how_to_install"]


MAX_WORD = 64  # characters of a name that may be a misspelling; difflib takes seconds for a name of megabytes


class RequestError(TinyGPTError):
    """A prompt, parameter or flag that cannot be served.

    field: the refused field or flag, or None. `str()` is "{field} {reason}".
    value, allowed: for callers that build their own sentence.
    """

    def __init__(self, reason: str, field: str | None = None, value: Any = None, allowed: str | None = None):
        super().__init__(reason if field is None else f"{field} {reason}")
        self.reason = reason
        self.field = field
        self.value = value
        self.allowed = allowed

    def named(self, name: str | None) -> "RequestError":
        """Return the error with another name of the field, such as "--temperature"."""
        error = type(self)(self.reason, name, self.value, self.allowed)
        error.work_started = self.work_started
        return error


class FailedRequestError(TinyGPTError):
    """A request that failed after its start; others go on."""

    work_started = True


class ServerError(TinyGPTError):
    """A server that cannot be reached, needs another key, or is not a tinygpt server."""


class QueueFullError(TinyGPTError):
    """`max_queue` samples are waiting: submit again later."""


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


# Message and exit code: 128 + the signal, as a shell reports it.
INTERRUPTS = {KeyboardInterrupt: ("interrupted", 130), Terminated: ("terminated", 143)}


def invalid(field: str, value: Any, allowed: str) -> RequestError:
    """Return the error "{field} is {value} and must be {allowed}."."""
    return RequestError(f"is {reprlib.repr(value)} and must be {allowed}.", field, value, allowed)


class OfOneProcess:
    """An object with threads of its process, which pickle and copy refuse."""

    _instead = "make one in each process: {}(...)"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        instead = self._instead.format(kind)
        raise TypeError(f"cannot pickle or copy this {kind}, which belongs to its process: {instead}.")


def closed(owner: str) -> RequestError:
    return RequestError(f"this {owner} has been closed: make a new one.")


def suggest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean NEAREST?" for a misspelled name, or "" if none of `names` is near."""
    from difflib import get_close_matches

    nearest = get_close_matches(name, names, n=1, cutoff=0.7) if len(name) <= MAX_WORD else []
    return f"; did you mean {nearest[0]}?" if nearest else ""


@contextmanager
def work_started_by(work: Sized) -> Iterator[None]:
    """Mark the block's error, if `work` is not empty."""
    try:
        yield
    except TinyGPTError as error:
        error.work_started = error.work_started or len(work) > 0
        raise
