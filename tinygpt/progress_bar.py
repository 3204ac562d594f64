"""A bar that counts what is finished."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from tinygpt.errors import RequestError

UseTqdm = bool | Callable[..., Iterable] | None


def with_bar(items: Iterable, total: int, use_tqdm: UseTqdm, noun: str = "prompts") -> Iterable[Any]:
    """The items, counted on stderr as they come; `LLM.generate` says what use_tqdm may be. `noun`: what is counted."""
    if not (use_tqdm is None or isinstance(use_tqdm, bool) or callable(use_tqdm)):
        raise RequestError(f"use_tqdm is {use_tqdm!r} and must be None, True, False or a function like tqdm.")
    if use_tqdm is None:
        use_tqdm = total > 1 and sys.stderr is not None and sys.stderr.isatty()
    if not use_tqdm:
        return items
    if use_tqdm is True:
        from tqdm import tqdm as use_tqdm
    return use_tqdm(items, total=total, unit=f" {noun}")
