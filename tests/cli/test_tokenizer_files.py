"""A tokenizer that is damaged, beside a checkpoint that is not: each command says so before it works."""

import json
import shutil
from pathlib import Path

import pytest

from support import tiny_checkpoint
from support.demo import VOCAB_SIZE
from support.paths import DEMO
from tinygpt.cli import main as cli
from tinygpt.hardware import bandwidth
from tinygpt.weights.open import open_checkpoint

TOKENIZER = ("vocab.json", "merges.txt")


def cut_short(folder: Path) -> None:
    (folder / "vocab.json").write_bytes((folder / "vocab.json").read_bytes()[:-9])


def merges_cut_short(folder: Path) -> None:
    (folder / "merges.txt").write_bytes((folder / "merges.txt").read_bytes()[:9000])


def of_another(folder: Path) -> None:
    with (folder / "merges.txt").open("a") as file:
        file.write("q q\n")


def no_file(folder: Path) -> None:
    (folder / "tokenizer_config.json").mkdir()


DAMAGES = {
    cut_short: "vocab.json is not valid JSON",
    merges_cut_short: "cut short: ",
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


def test_doctor_and_info_refuse_it(damaged, capsys, machine):
    folder, wrong = damaged
    said = f'the tokenizer of {folder} cannot be used, only token ids: the report says why, under "refused".'
    sentence = f"tinygpt: error: {said}\n"
    assert cli.main(["info", "--json", str(folder)]) == 1
    out, err = capsys.readouterr()
    report, told = json.loads(out), json.loads(out)["tokenizer"]["error"]
    assert wrong in told
    assert (report["refused"], err) == ([told], sentence)
    assert cli.main(["doctor", "--json", str(folder)]) == 1
    out, err = capsys.readouterr()
    checkpoint = json.loads(out)["checkpoint"]
    assert (checkpoint["refused"], checkpoint["tokenizer_error"]) == ([told], told)
    assert err.endswith(sentence)


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_the_text_says_it_once_where_it_says_what_is_refused(damaged, capsys, machine, command):
    folder, wrong = damaged
    assert cli.main([command, str(folder)]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    [refused] = [line for line in lines if wrong in line]
    assert refused.startswith("1 " if command == "info" else "refused ")
    assert ("error" if command == "info" else "tokenizer_error") + ' see "refused"' in lines


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_without_any_nothing_is_refused(tmp_path, capsys, machine, command):
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny")
    assert cli.main([command, str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("error" in line and "has no tokenizer that can be used" in line for line in lines)
    assert "nothing" in lines if command == "info" else "refused none" in lines


def test_doctor_says_of_a_whole_one_that_nothing_is_wrong(capsys, machine):
    assert cli.main(["doctor", "--json", "demo"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["tokenizer_error"] is None


# Tokens that the model has no row for.


def with_added(folder: Path, count: int) -> Path:
    return tiny_checkpoint.write_with_demo_tokenizer(folder, {f"<extra {i}>": VOCAB_SIZE + i for i in range(count)})


def told_by_info(capsys, folder: Path) -> tuple[list | None, list[str]]:
    """In the report, and in the lines of the text."""
    assert cli.main(["info", "--json", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert cli.main(["info", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    return report["tokenizer"]["outside_vocabulary"], [line for line in lines if line.startswith("outside_vocabulary")]


def test_info_lists_them(tmp_path, capsys):
    outside, lines = told_by_info(capsys, with_added(tmp_path / "one", 1))
    assert outside == [{"id": VOCAB_SIZE, "text": "<extra 0>"}]
    assert lines == [
        f"outside_vocabulary {VOCAB_SIZE} '<extra 0>', which the model has no row for: a text that holds one is refused"
    ]
    outside, [line] = told_by_info(capsys, with_added(tmp_path / "many", 7))
    assert [token["id"] for token in outside] == [*range(VOCAB_SIZE, VOCAB_SIZE + 7)]
    assert f"{VOCAB_SIZE + 4} '<extra 4>' and 2 more, which the model" in line


def test_info_lists_none_where_the_model_has_all(tmp_path, capsys):
    assert told_by_info(capsys, with_added(tmp_path / "none", 0)) == ([], [])


def test_a_text_to_calibrate_on_that_holds_one_is_refused(tmp_path, capsys):
    (text := tmp_path / "text").write_text("Once upon a time <extra 0> there was a king.")
    folder = with_added(tmp_path / "one", 1)
    assert cli.main(["convert", str(folder), str(tmp_path / "new"), "--calibrate", str(text)]) == 2
    assert f"token id {VOCAB_SIZE} is outside the vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
