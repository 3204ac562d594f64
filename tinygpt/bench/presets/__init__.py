"""Published studies of GPT-2's speed, repeated on your own machine and checkpoint: `bench --preset NAME`.

A module for each study: its protocol, its published figures with their source, and its own table with ours beside them.
`rerun` holds what all of them do, `report` what they return. A new study is a new module and a line in PRESETS.
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
WITH_REMOTE = "batch-inference"  # and --remote


def run_preset(name: str, options: PresetOptions, records: list[dict[str, Any]] | None = None) -> "PresetReport":
    """Repeat a study, one of PRESETS. Raises RequestError, before any work, for what is impossible.

    records: a list of the caller's, to which each case's record is appended as soon as it is measured; an interruption
    leaves them there.
    """
    if name not in PRESETS:
        raise RequestError(f"there is no preset {name!r}: give one of {', '.join(PRESETS)}.")
    check_options(options)
    if options.text is not None and name != WITH_PERPLEXITY:
        raise RequestError(
            f"--text is for a perplexity and {name} has none: omit it, or give --preset {WITH_PERPLEXITY}."
        )
    if options.remote and name != WITH_REMOTE:
        raise RequestError(
            f"--remote is for a model behind a server and {name} has none: omit it, or give --preset {WITH_REMOTE}."
        )
    return import_module(f"{__name__}.{name.replace('-', '_')}").run(options, [] if records is None else records)
