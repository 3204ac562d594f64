"""Flags that several commands share, and the model that they ask for.

Values come from the command line, else from variables, else from --config FILE, else from our defaults.
"""

import argparse
import gc
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import invalid, suggest
from ..hardware import thread_count
from ..llm_args import LLMArgs
from ..sampling_params import GROUPS, SAMPLING_FIELDS, SamplingParams
from ..weights.config import dtype_name

if TYPE_CHECKING:
    from ..llm import LLM

SHORT = {"model": ["-m"], "threads": ["-t"], "max_tokens": ["-n"], "seed": ["-s"]}  # as in llama.cpp
OTHER_NAMES = {"split_special_tokens": "--no-special-tokens", "prompt_text": "--prompt"}
RANK_FLAGS = ("tensor_parallel_size", "pipeline_parallel_size")
CPU_FLAGS = ("model", "dtype", "kv_cache_dtype", "threads")  # of every command that loads a model on the CPU
# Each library reads its variable once, when it is imported.
LIBRARIES = ("NUMBA_NUM", "OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "VECLIB_MAXIMUM")
THREAD_POOLS = tuple(f"{library}_THREADS" for library in LIBRARIES)


@dataclass(frozen=True)
class Command:
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], None]
    arguments: str = "[flags]"  # with MODEL, a word that is --model
    everyday: tuple[str, ...] = ()  # names that --help shows; --help-all shows the others too; (): all
    rare: str = ""  # said of the others


def dtypes(text: str) -> tuple[str, ...]:
    return tuple(map(dtype_name, text.split(",")))


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def steering(text: str) -> tuple[str, float, range | None]:
    """Read FILE[:STRENGTH[:FIRST-LAST]]. Raise ValueError."""
    path, strength, first, last = re.fullmatch(
        r"(.+?)(?::([-+.\deE]+)(?::(\d+)-(\d+))?)?", text, re.DOTALL
    ).groups()
    return path, float(strength or 1), None if first is None else range(int(first), int(last) + 1)


def _with_default(text: str, default: Any) -> str:
    if "(default: " in text:
        return text
    shown = "none" if default is None else "off" if default is False else default
    return f"{text} (default: {shown:g})" if isinstance(shown, float) else f"{text} (default: {shown})"


def options_of(field: Field, default: Any) -> dict[str, Any]:
    """Return the arguments of add_argument. field: of LLMArgs, SamplingParams or ServerConfig."""
    rule = field.metadata["rule"]
    text = field.metadata["help"]
    if rule.repeats and "several" not in text:
        text += "; may be given several times"
    options = {"default": default, "help": _with_default(text, default)}
    if rule.parse is None:
        return {"action": "store_true", **options}
    options |= {"type": rule.parse, "metavar": field.metadata["metavar"]}
    if rule.repeats:
        return {"action": "append", **options}
    return {"nargs": rule.nargs, "choices": rule.choices, **options}


def flags_of(record: type) -> dict[str, Field]:
    """Return the fields of LLMArgs or ServerConfig that have a flag, by its name."""
    declared = [field for field in fields(record) if field.metadata["flag"] is not None]
    return {field.metadata["flag"] or field.name: field for field in declared}


MODEL_FLAGS = flags_of(LLMArgs)


def flag_of(name: str) -> str:
    return OTHER_NAMES.get(name, f"--{name.replace('_', '-')}")


def add_flag(group: argparse._ActionsContainer, name: str, **changes: Any) -> None:
    """Add a flag of the model; `changes` replace arguments of add_argument."""
    field = MODEL_FLAGS[name]
    options = {**options_of(field, field.default), **changes}
    group.add_argument(*SHORT.get(name, ()), flag_of(name), dest=name, **options)


def add_group(
    parser: argparse.ArgumentParser, names: Iterable[str] = MODEL_FLAGS, **changes: dict[str, Any]
) -> argparse._ArgumentGroup:
    """changes: those of `add_flag`, by name."""
    group = parser.add_argument_group("model")
    for name in names:
        add_flag(group, name, **changes.get(name, {}))
    return group


def add_checkpoint(parser: argparse._ActionsContainer, **changes: Any) -> None:
    add_flag(parser, "model", **changes)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def add_chat_template(add: Callable[..., Any]) -> None:
    """add: add_argument of a group."""
    add(
        "--chat-template",
        metavar="FILE",
        help="a file with a Jinja template for chats, or plain: the messages' texts, a line each, which the model "
        "continues (default: the model's own)",
    )


def add_color(add: Callable[..., Any]) -> None:
    """As `add_chat_template`."""
    add(
        "--color",
        choices=("auto", "always", "never", "surprise"),
        default="auto",
        help="colors of messages: always, never, or auto, on a terminal without $NO_COLOR; surprise: auto, and tokens "
        "by how much they surprised the model, in a pipe, too (default: auto)",
    )


def llm_args(args: argparse.Namespace, **more: Any) -> LLMArgs:
    """more: arguments without a flag."""
    values = {field.name: getattr(args, flag) for flag, field in MODEL_FLAGS.items() if flag in args}
    for name in ("lora_modules", "soft_prompts"):
        values[name] = dict(values.get(name) or ())
    return LLMArgs(**values, **more)


def has_ranks(args: argparse.Namespace) -> bool:
    return any(getattr(args, name, 1) != 1 for name in RANK_FLAGS)


def set_thread_pools(threads: int | None) -> None:
    """Size the thread pools of libraries that are not imported yet; a variable stays if `threads` is None."""
    count = thread_count(threads)
    if "numba" in sys.modules:  # its pool has its size, and Numba refuses another one
        return
    for name in THREAD_POOLS:
        if threads is not None or name not in os.environ:
            os.environ[name] = str(count)
    # After NumPy is imported, OpenBLAS's threads spin for 50 ms on cores that the start needs. 4 is the least.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


def load_llm(args: argparse.Namespace, **more: Any) -> "tuple[LLM, float]":
    """Return the model, and the seconds to load it. more: as in `llm_args`."""
    started = time.perf_counter()
    set_thread_pools(args.threads)
    gc.disable()  # modules and a tokenizer are half a million live objects: scanning them takes 0.1 s
    try:
        from ..llm import LLM

        llm = LLM(**vars(llm_args(args, **more)))
        gc.freeze()
    finally:
        gc.enable()
    return llm, time.perf_counter() - started


def compiling(args: argparse.Namespace) -> str:
    """Return "; compiling 9 kernels 12.30 s" if this run has compiled kernels, else "" """
    if args.device != "cpu":
        return ""
    from ..kernels.cpu.jit import compile_times

    count, seconds = compile_times()
    return f"; compiling {count} kernel{'s' * (count > 1)} {seconds:.2f} s" if count else ""


def warm_up(llm: "LLM", args: argparse.Namespace) -> None:
    """Take a step if loading compiled kernels, so that rates contain less compilation."""
    if args.device != "cpu":
        return
    from ..kernels.cpu.jit import compile_times

    if compile_times()[0]:
        from ..llm import WARMUP_REQUESTS

        llm.generate([[0]], max_tokens=2, seed=0, **WARMUP_REQUESTS[args.temperature > 0])


# Other fields have SamplingParams' own.
DEFAULTS = {
    "max_tokens": 128,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
}
FLAGS = {  # the fields of SamplingParams that have a flag
    name: field
    for name, field in SAMPLING_FIELDS.items()
    if field.metadata["group"] in GROUPS
    and (field.metadata["metavar"] or field.metadata["rule"].parse is None)
}


def add_sampling_groups(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """defaults: of a command, by field."""
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for name, field in FLAGS.items():
            if field.metadata["group"] != title:
                continue
            default = (DEFAULTS | defaults).get(name, field.default)
            group.add_argument(*SHORT.get(name, ()), flag_of(name), dest=name, **options_of(field, default))


def params_of(args: argparse.Namespace, **others: Any) -> SamplingParams:
    """Return the params. Without a --temperature, beams set it to 0 in `args`, too; --color may need `logprobs`."""
    if args.num_beams > 1 and "temperature" not in args.given:
        args.temperature = 0.0
    if shows_surprise(args):
        if args.logprobs_mode != "raw":
            raise invalid("--logprobs-mode", args.logprobs_mode, "raw with --color surprise")
        others["logprobs"] = args.logprobs or 0  # of the sampled token alone
    values = {name: getattr(args, name) for name in FLAGS} | others
    return SamplingParams(soft_prompt=soft_prompt_of(args), **values)


def soft_prompt_of(args: argparse.Namespace) -> str | None:
    return args.soft_prompt[0][0] if args.soft_prompt else None


def shows_surprise(args: argparse.Namespace) -> bool:
    """Return whether --color asks for colored tokens, which $NO_COLOR turns off."""
    return args.color == "surprise" and not os.environ.get("NO_COLOR")


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return the params, with a seed drawn if there is none: 32 bits, exact for JSON readers that use float64."""
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


VARIABLES = {f"TINYGPT_{name}": f"--{name.lower()}" for name in ("MODEL", "HOST", "PORT", "DTYPE", "THREADS")}
VARIABLES["TINYGPT_LOG"] = "--log-level"
MAX_CONFIG = 2**20  # characters of a file, and parts of its JSON: an alias in YAML may stand for any number
JSON = json.JSONEncoder(default=str)  # of dates, too


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
        [JSON.encode(value)]
        if isinstance(value, dict)
        else map(str, value if isinstance(value, list) else [value])
    )
    if action.nargs is not None:
        return parser._get_values(action, [*texts])
    if isinstance(action, argparse._AppendAction):
        return [parser._get_values(action, [text]) for text in texts]
    return parser._get_values(action, [",".join(texts)])


def read_config(parser: argparse.ArgumentParser, file: str) -> Mapping[str, Any]:
    """Return the keys of a file in YAML. Exit with a message if it cannot be read."""
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise ValueError(f"it has more than {MAX_CONFIG} characters")
        import yaml

        values = yaml.safe_load(text) or {}
        if sum(1 for _ in islice(JSON.iterencode(values), MAX_CONFIG)) == MAX_CONFIG:
            raise ValueError("its aliases have too many values")
    except Exception as error:  # YAML's own, ImportError, OSError, ValueError, RecursionError
        parser.error(f"--config {file} cannot be read: {error}")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        parser.error(f"--config {file} must map names of flags to values")
    return values
