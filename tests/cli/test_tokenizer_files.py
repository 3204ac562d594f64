"""A tokenizer that is damaged, beside a checkpoint that is not: each command says so before it works."""

import json
import shutil
from pathlib import Path

import pytest

from support import tiny_checkpoint
from support.paths import DEMO
from tinygpt.cli import main as cli
from tinygpt.hardware import bandwidth
from tinygpt.weights.open import open_checkpoint

TOKENIZER = ("vocab.json", "merges.txt")


def cut_short(folder: Path) -> None:
    (folder / "vocab.json").write_bytes((folder / "vocab.json").read_bytes()[:-9])


def of_another(folder: Path) -> None:
    with (folder / "merges.txt").open("a") as file:
        file.write("q q\n")


def no_file(folder: Path) -> None:
    (folder / "tokenizer_config.json").mkdir()


DAMAGES = {
    cut_short: "vocab.json is not valid JSON",
    of_another: "vocab.json lacks 'qq', which a merge uses or makes",
    no_file: "tokenizer_config.json",
}


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damaged(request, tmp_path) -> tuple[Path, str]:
    """The folder, and what is wrong with it."""
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny")
    for name in TOKENIZER:
        shutil.copyfile(DEMO / name, folder / name)
    request.param(folder)
    return folder, DAMAGES[request.param]


@pytest.fixture
def machine(monkeypatch) -> None:
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda threads: 1e9 * threads)


@pytest.mark.parametrize("flags", [[], ["--dtype", "float8"], ["--to", "safetensors"], ["--to", "gguf"]])
def test_convert_refuses_it_and_writes_nothing(damaged, tmp_path, capsys, flags):
    folder, wrong = damaged
    assert cli.main(["convert", str(folder), str(tmp_path / "new"), *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tinygpt: error: ")
    assert wrong in err
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("flags", [[], ["--to", "safetensors"]])
def test_convert_takes_a_checkpoint_without_one(tmp_path, flags):
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny")
    assert cli.main(["convert", str(folder), str(tmp_path / "new"), *flags]) == 0
    assert open_checkpoint(str(tmp_path / "new")).config == open_checkpoint(str(folder)).config


def test_doctor_and_info_tell_it(damaged, capsys, machine):
    folder, wrong = damaged
    assert cli.main(["info", "--json", str(folder)]) == 0  # token ids work
    told = json.loads(capsys.readouterr().out)["tokenizer"]["error"]
    assert wrong in told
    assert cli.main(["doctor", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["tokenizer_error"] == told
    assert cli.main(["doctor", str(folder)]) == 0
    assert told in capsys.readouterr().out


def test_doctor_says_of_a_whole_one_that_nothing_is_wrong(capsys, machine):
    assert cli.main(["doctor", "--json", "demo"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["tokenizer_error"] is None
