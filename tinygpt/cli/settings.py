"""Defaults of flags from --config FILE and from variables: command line > environment > file > our defaults."""

import argparse
import json
import os
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import how_to_install, suggest

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
