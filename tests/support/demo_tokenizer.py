"""The demo's tokenizer, made once in a process: most models of these tests have it, half of what they load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.paths import DEMO
from tinygpt.tokenizer import tokenizer
from tinygpt.tokenizer.tokenizer import TokenizerModel

FILES = ("merges.txt", "vocab.json")
# What comes before these or adds to them.
OTHERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@contextmanager
def made_once() -> Iterator[None]:
    """In the block, folders with the demo's two files, to the byte, share what is made of them, which never changes."""
    read, make = tokenizer.read_tokenizer, tokenizer._load
    content = [(DEMO / name).read_bytes() for name in FILES]
    spec = read(DEMO)
    made = make(spec)

    def is_demo(folder: Path) -> bool:
        files = [folder / name for name in FILES]
        is_alone = all(file.is_file() for file in files) and not any((folder / name).exists() for name in OTHERS)
        return is_alone and [file.read_bytes() for file in files] == content

    def make_once(given: dict[str, Any]) -> TokenizerModel:
        return made if given is spec else make(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "read_tokenizer", lambda folder: spec if is_demo(folder) else read(folder))
        patch.setattr(tokenizer, "_load", make_once)
        yield
