"""tinygpt: GPT-2 inference from scratch on NumPy and Numba.

>>> from tinygpt import LLM, SamplingParams
>>> LLM("demo").generate("Once upon a time", SamplingParams(max_tokens=16))
"""

from pathlib import Path

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

# In a checkout, tinygpt.kernels and tinygpt.weights are the top-level folders beside this one.
_root = Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").is_file():
    __path__.append(str(_root))


def __getattr__(name: str):
    """Import the classes on first use, so that `--help` never waits for NumPy or Numba."""
    if name == "LLM":
        from tinygpt.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from tinygpt.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from tinygpt.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tinygpt' has no attribute {name!r}")
