"""tinygpt: GPT-2 inference from scratch on NumPy and Numba.

>>> from tinygpt import LLM, SamplingParams
>>> LLM("demo").generate("Once upon a time", SamplingParams(max_tokens=16))
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "RemoteLLM", "SamplingParams", "__version__", "warmup"]
_HOMES = {"AsyncLLM": "async_llm", "RemoteLLM": "remote", "SamplingParams": "sampling_params"}  # others: llm


def __getattr__(name: str):
    """Import a name on first use, so that `--help` never waits for NumPy or Numba."""
    if name not in __all__:
        raise AttributeError(f"module 'tinygpt' has no attribute {name!r}")
    return getattr(import_module(f"tinygpt.{_HOMES.get(name, 'llm')}"), name)
