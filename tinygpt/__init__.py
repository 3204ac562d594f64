"""tinygpt: GPT-2 inference from scratch on NumPy and Numba.

>>> from tinygpt import LLM, SamplingParams
>>> LLM("demo").generate("Once upon a time", SamplingParams(max_tokens=16))
"""

from pathlib import Path
from typing import TYPE_CHECKING

if not Path(__file__).with_name("kernels").is_dir():  # a checkout without symbolic links
    __path__.append(str(Path(__file__).parents[1]))

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ControlVector",
    "Edit",
    "PromptType",
    "RemoteLLM",
    "SamplingParams",
    "__version__",
    "warmup",
]

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .engine.prompts import PromptType
    from .llm import LLM, warmup
    from .look.edits import ControlVector, Edit
    from .remote import RemoteLLM
    from .sampling_params import SamplingParams
else:
    _HOMES = {
        "AsyncLLM": "async_llm",
        "ControlVector": "look.edits",
        "Edit": "look.edits",
        "PromptType": "engine.prompts",
        "RemoteLLM": "remote",
        "SamplingParams": "sampling_params",
    }  # others: llm

    def __getattr__(name: str):
        """Import a name on first use, so that `--help` never waits for NumPy or Numba."""
        from importlib import import_module

        if name == "show":
            return import_module("tinygpt.look.html")
        if name not in __all__:
            raise AttributeError(f"module 'tinygpt' has no attribute {name!r}")
        return getattr(import_module(f"tinygpt.{_HOMES.get(name, 'llm')}"), name)

    def __dir__() -> list[str]:
        return __all__
