"""What a user chooses about a preset; everything else is as in the study."""

from dataclasses import dataclass
from pathlib import Path

from tinygpt.errors import RequestError
from tinygpt.weights.config import DTYPES


@dataclass(frozen=True)
class PresetOptions:
    """dtypes, threads: as LLM's. repetitions: None is the preset's own number. small: a quick look, of fewer sizes.

    text: a file in UTF-8 for perplexity, where the study has that. remote: also with the model behind a server, where
    the study is of that. device: "cpu", or "cuda" for a GPU.
    """

    model: str
    dtypes: tuple[str, ...] = ("auto",)
    threads: int | None = None
    repetitions: int | None = None
    small: bool = False
    text: str | Path | None = None
    remote: bool = False
    device: str = "cpu"


def check_options(options: PresetOptions) -> None:
    """RequestError for options that no model could run with."""
    if not options.dtypes:
        raise RequestError(f"no dtype is given: give one or several of auto, {', '.join(DTYPES)}.")
    if options.repetitions is not None and options.repetitions < 1:
        raise RequestError(f"repetitions is {options.repetitions} and must be 1 or more.")
