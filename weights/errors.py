"""Errors of checkpoints, and the base class of every deliberate error."""


class TinyGPTError(ValueError):
    """Base of every deliberate error; the command line prints it without a traceback."""

    work_started = False  # True: the exit code is 1 instead of 2


class CheckpointError(TinyGPTError):
    """A folder, file or Hub id that cannot be loaded: absent, damaged, incomplete or not implemented."""


class NoTokenizerError(CheckpointError):
    """A checkpoint without a usable tokenizer, which still takes token ids."""


class LostFileError(CheckpointError):
    """A file of a loaded checkpoint that was cut short during use."""

    work_started = True


def how_to_install(extra: str) -> str:
    """Return the command that installs one of the package's extras."""
    return f'pip install "tinygpt[{extra}]" (or pip install ".[{extra}]" in a clone)'
