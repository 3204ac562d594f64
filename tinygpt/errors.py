"""Errors that a user can act on. Each message says what was given, what is allowed and what to do."""

import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager


class TinyGPTError(ValueError):
    """Base of every error that tinygpt raises on purpose; the command line prints it without a traceback."""

    is_late = False  # whether work was done before: then even what is refused has failed on the way


class CheckpointError(TinyGPTError):
    """A folder, file or Hub id cannot be loaded: absent, damaged, incomplete or not implemented."""


class NoTokenizerError(CheckpointError):
    """A checkpoint has no tokenizer that runs here: none at all, one of a kind that is not implemented, or one whose
    package is not installed. It takes token ids."""


class LostFileError(CheckpointError):
    """A file of a loaded checkpoint was cut short while it was in use."""

    is_late = True


class RequestError(TinyGPTError):
    """A prompt or a parameter cannot be served as asked."""


class FailedRequestError(TinyGPTError):
    """A request that was begun could not go on; no other has noticed."""

    is_late = True


class ServerError(TinyGPTError):
    """A server cannot be reached, wants another key, or is none that can be used."""


class QueueFullError(TinyGPTError):
    """As many samples as max_queue allows are waiting: submit again later."""


@contextmanager
def late_behind(work: Sized) -> Iterator[None]:
    """What is raised in the block once there is any `work` is late."""
    try:
        yield
    except TinyGPTError as error:
        error.is_late = error.is_late or len(work) > 0
        raise


def how_to_install(extra: str) -> str:
    """One of the package's extras. It is installed from its sources: what an index has by its name may be another's."""
    return f'pip install ".[{extra}]" where tinygpt was cloned'


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an exception from a user's function may be Ctrl-C; Python raises that in the main thread only."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
