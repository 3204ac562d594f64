"""Flags that several commands share: the arguments of LLM, and the fields of SamplingParams, as declared there."""

import argparse
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tinygpt.errors import RequestError
from tinygpt.sampling_params import GROUPS, SAMPLING_FIELDS, SamplingParams
from tinygpt.weights.config import DTYPES

# Names in llama.cpp, vLLM, transformers, nanoGPT and FasterTransformer, of flags (--help does not list them) and JSONL.
ALIASES = {
    "max_tokens": ("n_predict", "predict", "max_new_tokens", "output_len"),
    "min_tokens": ("min_new_tokens",),
    "temperature": ("temp",),
    "top_k": ("topk",),
    "top_p": ("topp",),
    "typical_p": ("typical",),
    "top_n_sigma": ("top_nsigma",),
    "dry_sequence_breakers": ("dry_sequence_breaker",),
    "seed": ("random_seed",),
    "n": ("num_return_sequences", "num_samples"),
    "stop": ("stop_strings",),
    "num_beams": ("beam_width",),
    "length_penalty": ("len_penalty",),
    "guided_json": ("json_schema",),
    "guided_grammar": ("grammar",),
    "model": ("model_name_or_path",),
    "dtype": ("torch_dtype",),
    "max_num_seqs": ("parallel",),
    "draft_model": ("model_draft", "speculative_model"),
    "num_speculative_tokens": ("draft_max",),
    "tensor_parallel_size": ("tensor_para_size",),
    "pipeline_parallel_size": ("pipeline_para_size",),
}
DTYPE_ALIASES = {
    **dict.fromkeys(("f32", "fp32", "float"), "float32"),
    **dict.fromkeys(("f16", "fp16", "half"), "float16"),
    "bf16": "bfloat16",
}
SHORT = {"model": ["-m"], "threads": ["-t"], "max_tokens": ["-n"], "seed": ["-s"]}  # as in llama.cpp
OTHER_NAMES = {
    "tensor_parallel_size": "--tensor-parallel",
    "pipeline_parallel_size": "--pipeline-parallel",
    "split_special_tokens": "--no-special-tokens",
}
RANK_FLAGS = ("tensor_parallel_size", "pipeline_parallel_size")
CPU_FLAGS = ("model", "dtype", "kv_cache_dtype", "threads")  # of every command that loads a model on the CPU


@dataclass(frozen=True)
class Command:
    """A command: its line in the list of commands, its flags, and the function that runs it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], None]
    arguments: str = "[flags]"
    everyday: tuple[str, ...] = ()  # names that --help shows; --help-all shows the others too; (): all
    rare: str = ""  # said of the others


CHECKPOINT = '"demo" (embedded), a local folder or file, or a Hub id'


def dtype(text: str) -> str:
    """Return the name of a dtype in lower case, with the aliases of other programs resolved."""
    name = text.strip().lower()
    return DTYPE_ALIASES.get(name, name)


def dtypes(text: str) -> tuple[str, ...]:
    return tuple(map(dtype, text.split(",")))


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError
    return name, path


def _with_default(about: str, default: Any) -> str:
    if "(default: " in about:
        return about
    shown = "none" if default is None else "off" if default is False else default
    return f"{about} (default: {shown:g})" if isinstance(shown, float) else f"{about} (default: {shown})"


def _option(default: Any, kind: Callable[[str], Any], metavar: str | None, about: str, **more: Any) -> dict[str, Any]:
    return {"default": default, "type": kind, "metavar": metavar, "help": _with_default(about, default), **more}


WEIGHTS = f"precision of the weights: {', '.join(DTYPES)}"
KV_CACHE = (
    "precision of the KV cache: float32, bfloat16 or int8; auto is float32 for float32 weights, otherwise bfloat16"
)
SOFT_PROMPT = "a soft prompt in PEFT's layout"
# An argument of LLM -> arguments of add_argument.
MODEL_FLAGS: dict[str, dict[str, Any]] = {
    "model": _option("demo", str, None, CHECKPOINT),
    "dtype": _option("auto", dtype, None, f"{WEIGHTS}; auto is the dtype of a converted checkpoint, otherwise float32"),
    "kv_cache_dtype": _option("auto", dtype, "DTYPE", KV_CACHE),
    "threads": _option(None, int, "N", "threads that compute (default: one for each fast physical core)"),
    "device": _option("cpu", str.lower, None, '"cpu"; "cuda": an NVIDIA GPU; "reference": NumPy in float64, slow'),
    "max_num_seqs": _option(32, int, "N", "samples that run at once; others wait"),
    "max_num_batched_tokens": _option(
        None, int, "N", "new tokens in a step, prompt tokens included (default: 512, or --max-num-seqs if that is more)"
    ),
    "prefix_cache_seqs": _option(4, int, "N", "finished samples kept in the KV cache, for prompts that begin alike"),
    "max_model_len": _option(
        None, int, "N", "positions reserved for each sample, prompt included (default: all that the model has)"
    ),
    "lora": _option(None, str, "PATH", "a LoRA adapter in PEFT's layout to merge"),
    "soft_prompt": _option(
        None,
        named_path,
        "NAME=PATH",
        f"{SOFT_PROMPT} in front of every prompt; with --input, several may be given: a line's field soft_prompt names "
        "one, and the default is the first",
        action="append",
    ),
    "draft_model": _option(
        None, str, "MODEL", "a smaller model with the same tokens that drafts: fewer steps, the same text"
    ),
    "num_speculative_tokens": _option(4, int, "N", "tokens of a draft"),
    "tensor_parallel_size": _option(1, int, "N", "processes that share each layer, up to 4; mpiexec starts them"),
    "pipeline_parallel_size": _option(1, int, "N", "stages that share the layers, each of --tensor-parallel processes"),
    "split_special_tokens": {
        "action": "store_true",
        "help": "read a special token in a text, such as <|endoftext|>, as plain text: for texts of strangers "
        "(default: it is that token)",
    },
}


def flag_of(name: str) -> str:
    return OTHER_NAMES.get(name, _spelled(name))


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add(group: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """Add a flag and its hidden aliases: from ALIASES, and the name if the flag differs from it."""
    flag = flag_of(name)
    group.add_argument(*SHORT.get(name, ()), flag, dest=name, **options)
    aliases = [_spelled(alias) for alias in (name, *ALIASES.get(name, ())) if _spelled(alias) != flag]
    if aliases:
        hidden = {key: options[key] for key in ("type", "action", "metavar") if key in options}
        group.add_argument(*aliases, dest=name, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **hidden)


def add_flag(group: argparse._ActionsContainer, name: str, **changes: Any) -> None:
    """Add a flag of the model; `changes` replace arguments of add_argument."""
    _add(group, name, **{**MODEL_FLAGS[name], **changes})


def add_group(
    parser: argparse.ArgumentParser, names: Iterable[str] = MODEL_FLAGS, **changes: dict[str, Any]
) -> argparse._ArgumentGroup:
    """Add a group "model" with these flags; `changes` are those of `add_flag`, by name."""
    group = parser.add_argument_group("model")
    for name in names:
        add_flag(group, name, **changes.get(name, {}))
    return group


def add_checkpoint(parser: argparse._ActionsContainer, about: str = f"{CHECKPOINT} (default: demo)") -> None:
    """Add CHECKPOINT, --model, which means the same, and --json; `checkpoint_of` returns the given one."""
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=about)
    add_flag(parser, "model", default=None, help="the same, as in all commands")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def add_chat_template(add: Callable[..., Any]) -> None:
    """add: add_argument of a group."""
    about = (
        "a file with a Jinja template for chats, or plain: the messages' texts, a line each, which the model continues "
        "(default: the model's own)"
    )
    add("--chat-template", metavar="FILE", help=about)


def checkpoint_of(args: argparse.Namespace) -> str:
    return one_of_both("CHECKPOINT", args.checkpoint, args.model) or "demo"


def one_of_both(name: str, argument: str | None, model: str | None) -> str | None:
    """Return the argument `name` or --model. Raise RequestError if both are given."""
    if argument is not None and model is not None:
        raise RequestError(f"{name} is {argument} and --model is {model}: give one of them.")
    return argument if model is None else model


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in MODEL_FLAGS}
    soft_prompts = dict(given.pop("soft_prompt") or ())
    return {**given, "soft_prompts": soft_prompts}


DEFAULTS = {"max_tokens": 128, "temperature": 0.8, "top_k": 40, "top_p": 0.95}  # other fields have SamplingParams' own
FLAGS = {  # the fields of SamplingParams that have a flag
    name: field
    for name, field in SAMPLING_FIELDS.items()
    if field.metadata["metavar"] or field.metadata["rule"].parse is None
}


def add_sampling_groups(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """defaults: of a command, by field."""
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for name, field in FLAGS.items():
            if field.metadata["group"] != title:
                continue
            rule, about = field.metadata["rule"], field.metadata["help"]
            default = (DEFAULTS | defaults).get(name, field.default)
            options = {"action": "store_true"}
            if rule.parse is not None:
                action = "append" if rule.repeats else "store"
                options = {"type": rule.parse, "metavar": field.metadata["metavar"], "action": action}
            if rule.repeats and "several times" not in about:
                about += "; may be given several times"
            _add(group, name, default=default, help=_with_default(about, default), **options)


def params_of(args: argparse.Namespace, **others: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(args, name) for name in FLAGS}, **others)


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return the params, with a seed drawn if there is none: 32 bits, exact for JSON readers that use float64."""
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))
