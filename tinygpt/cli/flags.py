"""Flags that several commands share: the arguments of LLM, and the fields of SamplingParams, as declared there.

Values come from the command line, else from variables, else from --config FILE, else from our defaults.
"""

import argparse
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import how_to_install, invalid, suggest
from ..sampling_params import GROUPS, SAMPLING_FIELDS, SamplingParams
from ..weights.config import DTYPES, dtype_name

SHORT = {"model": ["-m"], "threads": ["-t"], "max_tokens": ["-n"], "seed": ["-s"]}  # as in llama.cpp
OTHER_NAMES = {"split_special_tokens": "--no-special-tokens", "prompt_text": "--prompt"}
RANK_FLAGS = ("tensor_parallel_size", "pipeline_parallel_size")
CPU_FLAGS = ("model", "dtype", "kv_cache_dtype", "threads")  # of every command that loads a model on the CPU


@dataclass(frozen=True)
class Command:
    """A command: its line in the list of commands, its flags, and the function that runs it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], None]
    arguments: str = "[flags]"  # with MODEL, a word that is --model
    everyday: tuple[str, ...] = ()  # names that --help shows; --help-all shows the others too; (): all
    rare: str = ""  # said of the others


CHECKPOINT = (
    '"demo" (embedded), a local folder or file, or a Hub id, also as id@revision, id/file.gguf or id:q8_0'
)


def dtypes(text: str) -> tuple[str, ...]:
    return tuple(map(dtype_name, text.split(",")))


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError
    return name, path


def steering(text: str) -> tuple[str, float, range | None]:
    """Read FILE[:STRENGTH[:FIRST-LAST]]. Raise ValueError."""
    path, strength, first, last = re.fullmatch(
        r"(.+?)(?::([-+.\deE]+)(?::(\d+)-(\d+))?)?", text, re.DOTALL
    ).groups()
    return path, float(strength or 1), None if first is None else range(int(first), int(last) + 1)


def _with_default(about: str, default: Any) -> str:
    if "(default: " in about:
        return about
    shown = "none" if default is None else "off" if default is False else default
    return f"{about} (default: {shown:g})" if isinstance(shown, float) else f"{about} (default: {shown})"


def _option(
    default: Any, kind: Callable[[str], Any], metavar: str | None, about: str, **more: Any
) -> dict[str, Any]:
    return {
        "default": default,
        "type": kind,
        "metavar": metavar,
        "help": _with_default(about, default),
        **more,
    }


WEIGHTS = f"precision of the weights: {', '.join(DTYPES)}"
KV_CACHE = (
    "precision of the KV cache: float32, bfloat16 or int8; "
    "auto is float32 for float32 weights, otherwise bfloat16"
)
SOFT_PROMPT = "a soft prompt in PEFT's layout"
# An argument of LLM -> arguments of add_argument.
MODEL_FLAGS: dict[str, dict[str, Any]] = {
    "model": _option("demo", str, None, CHECKPOINT),
    "dtype": _option(
        "auto", dtype_name, None, f"{WEIGHTS}; auto: a converted checkpoint's, otherwise float32"
    ),
    "kv_cache_dtype": _option("auto", dtype_name, "DTYPE", KV_CACHE),
    "threads": _option(None, int, "N", "threads that compute (default: one for each fast physical core)"),
    "device": _option(
        "cpu", str.lower, None, '"cpu"; "cuda": an NVIDIA GPU; "reference": NumPy in float64, slow'
    ),
    "max_num_seqs": _option(32, int, "N", "samples that run at once; others wait"),
    "max_num_batched_tokens": _option(
        None,
        int,
        "N",
        "new tokens in a step, prompt tokens included (default: 512, or --max-num-seqs if that is more)",
    ),
    "prefix_cache_seqs": _option(
        4, int, "N", "finished samples kept in the KV cache, for prompts that begin alike"
    ),
    "max_model_len": _option(
        None,
        int,
        "N",
        "positions reserved for each sample, prompt included (default: all that the model has)",
    ),
    "lora": _option(None, str, "PATH", "a LoRA adapter in PEFT's layout to merge"),
    "lora_modules": _option(
        None,
        named_path,
        "NAME=PATH",
        "a LoRA adapter that requests may choose, as --lora-request",
        action="append",
    ),
    "soft_prompt": _option(
        None,
        named_path,
        "NAME=PATH",
        f"{SOFT_PROMPT} in front of every prompt; with --input, several may be given: a line's field soft_prompt names "
        "one, and the default is the first",
        action="append",
    ),
    "revision": _option(None, str, "NAME", "a commit, branch or tag of a Hub --model, as in id@NAME"),
    "draft_model": _option(
        None, str, "MODEL", "a smaller model with the same tokens that drafts: fewer steps, the same text"
    ),
    "num_speculative_tokens": _option(4, int, "N", "tokens of a draft"),
    "tensor_parallel_size": _option(
        1, int, "N", "processes that share each layer, up to 4; mpiexec starts them"
    ),
    "pipeline_parallel_size": _option(1, int, "N", "stages that share the layers, each of as many processes"),
    "split_special_tokens": {
        "action": "store_true",
        "help": "read a special token in a text, such as <|endoftext|>, as plain text: for texts of strangers "
        "(default: it is that token)",
    },
}


def flag_of(name: str) -> str:
    return OTHER_NAMES.get(name, f"--{name.replace('_', '-')}")


def add_flag(group: argparse._ActionsContainer, name: str, **changes: Any) -> None:
    """Add a flag of the model; `changes` replace arguments of add_argument."""
    options = {**MODEL_FLAGS[name], **changes}
    group.add_argument(*SHORT.get(name, ()), flag_of(name), dest=name, **options)


def add_group(
    parser: argparse.ArgumentParser, names: Iterable[str] = MODEL_FLAGS, **changes: dict[str, Any]
) -> argparse._ArgumentGroup:
    """Add a group "model" with these flags; `changes` are those of `add_flag`, by name."""
    group = parser.add_argument_group("model")
    for name in names:
        add_flag(group, name, **changes.get(name, {}))
    return group


def add_checkpoint(parser: argparse._ActionsContainer, **changes: Any) -> None:
    """Add --model and --json."""
    add_flag(parser, "model", **changes)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def add_chat_template(add: Callable[..., Any]) -> None:
    """add: add_argument of a group."""
    about = (
        "a file with a Jinja template for chats, or plain: the messages' texts, a line each, which the model continues "
        "(default: the model's own)"
    )
    add("--chat-template", metavar="FILE", help=about)


def add_color(add: Callable[..., Any]) -> None:
    """As `add_chat_template`."""
    about = (
        "colors of messages: always, never, or auto, on a terminal without $NO_COLOR; surprise: auto, and tokens by "
        "how much they surprised the model, in a pipe, too (default: auto)"
    )
    add("--color", choices=("auto", "always", "never", "surprise"), default="auto", help=about)


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in MODEL_FLAGS if name in args}
    soft_prompts, lora_modules = (
        dict(given.pop(name, None) or ()) for name in ("soft_prompt", "lora_modules")
    )
    return {**given, "lora_modules": lora_modules, "soft_prompts": soft_prompts}


DEFAULTS = {
    "max_tokens": 128,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
}  # other fields have SamplingParams' own
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
            rule = field.metadata["rule"]
            about = field.metadata["help"]
            default = (DEFAULTS | defaults).get(name, field.default)
            options = {"action": "store_true"}
            if rule.parse is not None:
                action = "append" if rule.repeats else "store"
                options = {"type": rule.parse, "metavar": field.metadata["metavar"], "action": action}
            if rule.repeats and "several times" not in about:
                about += "; may be given several times"
            shown = _with_default(about, default)
            group.add_argument(
                *SHORT.get(name, ()), flag_of(name), dest=name, default=default, help=shown, **options
            )


def params_of(args: argparse.Namespace, **others: Any) -> SamplingParams:
    """Return the params. Without a --temperature, beams set it to 0 in `args`, too; --color may need `logprobs`."""
    if args.num_beams > 1 and "temperature" not in args.given:
        args.temperature = 0.0
    if shows_surprise(args):
        if args.logprobs_mode != "raw":
            raise invalid("--logprobs-mode", args.logprobs_mode, "raw with --color surprise")
        others["logprobs"] = args.logprobs or 0  # of the sampled token alone
    return SamplingParams(**{name: getattr(args, name) for name in FLAGS} | others)


def shows_surprise(args: argparse.Namespace) -> bool:
    """Return whether --color asks for colored tokens, which $NO_COLOR turns off."""
    return args.color == "surprise" and not os.environ.get("NO_COLOR")


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return the params, with a seed drawn if there is none: 32 bits, exact for JSON readers that use float64."""
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


VARIABLES = {f"TINYGPT_{name}": f"--{name.lower()}" for name in ("MODEL", "HOST", "PORT", "DTYPE", "THREADS")}
VARIABLES["TINYGPT_LOG"] = "--log-level"


def set_defaults(
    parser: argparse.ArgumentParser,
    own_flag: Callable[[str], list[str]],
    given: Collection[str],
    file: str | None,
) -> None:
    """Replace the defaults of flags that are not `given`, or exit. own_flag: returns no ignored flag."""
    settings = [(f"--config {file}", read_config(parser, file))] if file is not None else []
    flags = parser._option_string_actions
    variables = {name: os.environ.get(name) for name, flag in VARIABLES.items() if flag in flags}
    settings += [(name, {VARIABLES[name]: value}) for name, value in variables.items() if value]
    for source, values in settings:
        for key, value in values.items():
            for flag in own_flag(f"--{key.removeprefix('--').replace('_', '-')}"):
                if (action := flags.get(flag)) is None or action.dest in ("help", "config"):
                    parser.error(f"{source}: unknown key {key}{suggest(f'--{key}', flags)}")
                if action.dest in given or value is None:
                    continue
                try:
                    parser.set_defaults(**{action.dest: _read(parser, action, value)})
                except argparse.ArgumentError as error:
                    parser.error(f"{source}: {error}")


def _read(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    """Return a value of a file as the flag's type reads its text. Raise ArgumentError."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise argparse.ArgumentError(action, f"invalid value: {value!r} (must be true or false)")
        return action.const if value else action.default
    texts = (
        [json.dumps(value)]
        if isinstance(value, dict)
        else map(str, value if isinstance(value, list) else [value])
    )
    if action.nargs is not None:
        return parser._get_values(action, [*texts])
    if isinstance(action, argparse._AppendAction):
        return [parser._get_values(action, [text]) for text in texts]
    return parser._get_values(action, [",".join(texts)])


def read_config(parser: argparse.ArgumentParser, file: str) -> Mapping[str, Any]:
    """Return the keys of a file in TOML (its name ends so) or YAML. Exit with a message if it cannot be read."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        if file.lower().endswith(".toml"):
            values = import_module("tomllib" if find_spec("tomllib") else "tomli").loads(text)
        else:
            import yaml

            values = yaml.safe_load(text) or {}
    except Exception as error:  # each parser has its own
        if getattr(error, "name", None) == "tomli":
            parser.error(f"--config {file}: TOML before Python 3.11 needs tomli: {how_to_install('toml')}")
        parser.error(f"--config {file} cannot be read: {error}")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        parser.error(f"--config {file} must map names of flags to values")
    return values
