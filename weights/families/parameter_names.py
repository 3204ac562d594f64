"""The engine's names of parameters, taken apart, and put together from what others call the same modules."""

import re
from collections.abc import Mapping

_PARAMETER = re.compile(r"h\.(\d+)\.(.+)\.(\w+)")  # of a layer


def split_name(parameter: str) -> tuple[int | None, str, str]:
    """The layer of a parameter (None: of none), its module and whether it is a weight or a bias."""
    found = _PARAMETER.fullmatch(parameter)
    if found is None:
        module, kind = parameter.rsplit(".", 1)
        return None, module, kind
    return int(found[1]), found[2], found[3]


def name_in_tables(parameter: str, top: Mapping[str, str], layers: str, modules: Mapping[str, str]) -> str:
    """A parameter's name where layers are `layers`.3, from the names of modules and of what is in no layer."""
    if parameter in top:
        return top[parameter]
    layer, module, kind = split_name(parameter)
    return f"{layers}.{layer}.{modules[module]}.{kind}"
