"""The tokenizer that the tests make once stands for the demo's files alone."""

import shutil
from pathlib import Path

import pytest

from support.demo_tokenizer import FILES, OTHERS
from support.paths import DEMO
from tinygpt.errors import CheckpointError
from tinygpt.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def is_shared(folder: Path) -> bool:
    try:
        return Tokenizer.from_folder(folder)._model is Tokenizer.from_folder(DEMO)._model
    except CheckpointError:  # it has read what is there
        return False


def test_a_folder_with_the_same_files_shares_it(folder):
    assert is_shared(folder)


@pytest.mark.parametrize("name", FILES)
def test_of_a_file_that_differs_by_a_byte_another_is_made(folder, name):
    with (folder / name).open("ab") as file:
        file.write(b"\n")
    assert not is_shared(folder)


@pytest.mark.parametrize("name", OTHERS)
def test_beside_a_file_that_counts_too_another_is_made(folder, name):
    (folder / name).write_text("{}")
    assert not is_shared(folder)
