"""The flags that choose a model and how it runs. To add one, add it to FLAGS under the name of LLM's argument."""

import argparse
from collections.abc import Iterable
from typing import Any

from tinygpt.cli.flags.types import dtype, kv_cache_dtype, one_of, reader, whole_number
from tinygpt.errors import RequestError
from tinygpt.weights.config import DTYPES

CHECKPOINT = '"demo" (embedded), a local folder or file, or a Hub id'
DTYPE = (
    f"precision of the weights: {', '.join(DTYPES)}; auto is the dtype of a converted checkpoint, and float32 for any "
    "other"
)


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError
    return name, path


# An argument of LLM -> what add_argument takes for the flag of its name, or of the name that stands under "flag"; and
# "short", a flag of one letter. These mean what they do in llama.cpp.
FLAGS: dict[str, dict[str, Any]] = {
    "model": {"short": "-m", "default": "demo", "help": f"{CHECKPOINT} (default: %(default)s)"},
    "dtype": {"type": dtype, "default": "auto", "help": f"{DTYPE} (default: %(default)s)"},
    "kv_cache_dtype": {
        "type": kv_cache_dtype,
        "default": "auto",
        "metavar": "DTYPE",
        "help": "precision of the KV cache: float32, bfloat16 or int8; auto is float32 for float32 weights, and "
        "bfloat16 for all others (default: %(default)s)",
    },
    "threads": {
        "short": "-t",
        "type": whole_number,
        "metavar": "N",
        "help": "threads that compute (default: one for each fast physical core)",
    },
    "device": {
        "type": one_of("cpu", "cuda", "reference"),
        "default": "cpu",
        "help": '"cpu"; "cuda": an NVIDIA GPU; "reference": NumPy in float64, slow (default: %(default)s)',
    },
    "max_num_seqs": {
        "type": whole_number,
        "default": 32,
        "metavar": "N",
        "help": "samples that run at once; others wait (default: %(default)s)",
    },
    "max_num_batched_tokens": {
        "type": whole_number,
        "metavar": "N",
        "help": "new tokens in a step, prompt tokens included (default: 512, or --max-num-seqs if that is more)",
    },
    "prefix_cache_seqs": {
        "type": whole_number,
        "default": 4,
        "metavar": "N",
        "help": "finished samples kept in the KV cache for prompts that begin like them (default: %(default)s)",
    },
    "max_model_len": {
        "type": whole_number,
        "metavar": "N",
        "help": "positions reserved for each sample, prompt included (default: all that the model has)",
    },
    "lora": {"metavar": "PATH", "help": "a LoRA adapter in PEFT's layout to merge (default: none)"},
    "soft_prompt": {
        "action": "append",
        "type": reader(_named_path, "NAME=PATH, a name of your choice and the folder or file"),
        "metavar": "NAME=PATH",
        "help": "a soft prompt in PEFT's layout, put in front of every prompt; with --input, several may be given: a "
        "line's field soft_prompt names one, and the first is used where there is no such field (default: none)",
    },
    "draft_model": {
        "metavar": "MODEL",
        "help": "a smaller model with the same tokens that drafts ahead: fewer steps, the same text (default: none)",
    },
    "num_speculative_tokens": {
        "type": whole_number,
        "default": 4,
        "metavar": "N",
        "help": "tokens that it drafts at a time (default: %(default)s)",
    },
    "tensor_parallel_size": {
        "flag": "--tensor-parallel",
        "type": whole_number,
        "default": 1,
        "metavar": "N",
        "help": "processes that share each layer, up to 4, started by mpiexec: by this one, or by the one that has "
        "started it (default: %(default)s)",
    },
    "pipeline_parallel_size": {
        "flag": "--pipeline-parallel",
        "type": whole_number,
        "default": 1,
        "metavar": "N",
        "help": "stages that the layers are dealt out to, each of --tensor-parallel processes (default: %(default)s)",
    },
    "split_special_tokens": {
        "flag": "--no-special-tokens",
        "action": "store_true",
        "help": "read a special token that is written in a text, such as <|endoftext|>, as plain text: for texts of "
        "unknown origin (default: it is that token)",
    },
}
RANK_FLAGS = ("tensor_parallel_size", "pipeline_parallel_size")
# Those of every command that loads a model into the CPU's kernels.
CPU_FLAGS = ("model", "dtype", "kv_cache_dtype", "threads")


def add_group(
    parser: argparse.ArgumentParser, names: Iterable[str] = FLAGS, **changes: dict[str, Any]
) -> argparse._ArgumentGroup:
    """A group "model" with these flags, and what is to be changed about some of them."""
    group = parser.add_argument_group("model")
    for name in names:
        add_flag(group, name, **changes.get(name, {}))
    return group


def add_flag(parser: argparse._ActionsContainer, name: str, **changes: Any) -> None:
    """One of FLAGS, with `changes`."""
    options = {"flag": f"--{name.replace('_', '-')}", **FLAGS[name], **changes}
    flags = [options.pop(which) for which in ("short", "flag") if which in options]
    parser.add_argument(*flags, dest=name, **options)


def add_checkpoint(parser: argparse._ActionsContainer, about: str = f"{CHECKPOINT} (default: demo)") -> None:
    """CHECKPOINT, and --model, which is the same: `checkpoint_of` says what was given."""
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=about)
    add_flag(parser, "model", default=None, help="the same, as in all commands")


def checkpoint_of(args: argparse.Namespace) -> str:
    """The checkpoint that is asked for by either; the demo if it is by none. RequestError if it is by both."""
    return one_of_both("CHECKPOINT", args.checkpoint, args.model) or "demo"


def one_of_both(name: str, argument: str | None, model: str | None) -> str | None:
    """What was given of the argument `name` and --model. RequestError if both were."""
    if argument is not None and model is not None:
        raise RequestError(f"{name} is {argument} and --model is {model}: give one of them.")
    return argument if model is None else model


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """LLM's arguments, from a command line with all FLAGS."""
    given = {name: getattr(args, name) for name in FLAGS}
    soft_prompts = dict(given.pop("soft_prompt") or ())
    return {**given, "soft_prompts": soft_prompts}
