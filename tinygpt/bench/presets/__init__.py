"""Published studies of GPT-2's speed, to be repeated on one's own machine and checkpoint: `bench --preset NAME`.

A module for each: its protocol, its published figures with their source, and its own table with ours beside them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinygpt.bench.presets.options import PresetOptions, check_options
from tinygpt.errors import RequestError

if TYPE_CHECKING:
    from tinygpt.bench.presets.report import PresetReport

PRESETS = {
    "batch-inference": "100 queries of 64 new tokens, batch 8 against batch 1 (microsoft/batch-inference)",
    "batching-notebook": "batch 1 to 128: duration, throughput and latency (pkuwangh/mlsys, P02 - Batching)",
    "cpu-study": "a 13-token prompt, 100 new tokens, top-k 40, ten runs, by dtype (bloomen/gpt-2-hf)",
    "onnx-study": "prompt x generation length, with perplexity by dtype (jdvin/whistle-stop)",
    "fastertransformer": "batch x input x output length: latency and memory (NVIDIA/FasterTransformer)",
}


WITH_PERPLEXITY = "onnx-study"  # the one that --text is for


def run_preset(name: str, options: PresetOptions, records: list[dict[str, Any]] | None = None) -> "PresetReport":
    """Repeat a study, one of PRESETS. Raises RequestError, before any work, for what is impossible.

    records: a list of the caller's, to which a record of each case is appended as soon as it is measured: what stops
    the preset midway leaves those there.
    """
    if name not in PRESETS:
        raise RequestError(f"there is no preset {name!r}: give one of {', '.join(PRESETS)}.")
    check_options(options)
    if options.text is not None and name != WITH_PERPLEXITY:
        raise RequestError(
            f"--text is for a perplexity and {name} has none: leave it away, or give --preset {WITH_PERPLEXITY}."
        )
    return import_module(f"{__name__}.{name.replace('-', '_')}").run(options, [] if records is None else records)
