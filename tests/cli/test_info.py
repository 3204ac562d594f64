"""`tinygpt info`, and `tinygpt doctor CHECKPOINT`: the content of a checkpoint, and all that is wrong with one."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from support import tiny_checkpoint
from support.paths import DEMO, EOS, VOCAB_SIZE
from tinygpt import hardware
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError


def info(capsys, folder: Path) -> dict:
    """The report; the status and the last line say whether the checkpoint can be used."""
    capsys.readouterr()
    code = cli.main(["info", str(folder), "--json"])
    out, err = capsys.readouterr()
    report = json.loads(out)
    refused = f'tinygpt: error: {folder} cannot be used: the report says why, under "refused".\n'
    assert (code, err) == ((1, refused) if report["refused"] else (0, ""))
    return report


def text(capsys, *words: object) -> list[str]:
    assert cli.main([*map(str, words)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_checkpoint.write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def with_tokenizer(folder) -> Path:
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(DEMO / name, folder / name)
    return folder


def test_a_checkpoint(capsys, folder):
    report = info(capsys, folder)
    assert report["path"] == str(folder)
    assert report["config"]["n_embd"] == tiny_checkpoint.C
    assert report["config"]["eos_token_ids"] == [2]
    assert report["tied"] is True
    assert report["converted_to"] is None
    assert report["ignored"] == report["refused"] == []
    assert report["tensors"].keys() == tiny_checkpoint.random_tensors().keys()
    shape = [tiny_checkpoint.C, 3 * tiny_checkpoint.C]
    assert report["tensors"]["transformer.h.1.attn.c_attn.weight"] == {
        "dtype": "float32",
        "shape": shape,
        "size": 4 * shape[0] * shape[1],
        "file": "model.safetensors",
    }


def test_everything_that_is_wrong_is_said_at_once(capsys, tmp_path):
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny", n_head=3, activation_function="made_up")
    (folder / "model.safetensors").write_bytes(b"not weights")
    report = info(capsys, folder)
    config, weights = report["refused"]
    assert "made_up" in config
    assert "model.safetensors is a damaged safetensors file" in weights
    assert report["config"] is report["tied"] is report["ignored"] is None
    assert report["tensors"] == {}
    assert "model.safetensors" in report["files"]
    assert "no tokenizer" in report["tokenizer"]["error"]
    assert cli.main(["info", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert err.endswith('cannot be used: the report says why, under "refused".\n')
    assert "activation_function is 'made_up'" in out.partition("\nrefused\n")[2]
    assert "unknown" in out


def test_hashes(capsys, folder):
    before = info(capsys, folder)
    content = (folder / "model.safetensors").read_bytes()
    assert before["files"]["model.safetensors"] == {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (folder / "notes.txt").write_text("no part of the checkpoint")
    moved = folder.rename(folder.with_name("moved"))
    assert info(capsys, moved)["content_hash"] == before["content_hash"]
    (moved / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert info(capsys, moved)["content_hash"] != before["content_hash"]
    (moved / "tokenizer.tinygpt").write_text(
        "prepared"
    )  # it decides the ids if it belongs to the other files
    expected = {"size": 8, "sha256": hashlib.sha256(b"prepared").hexdigest()}
    assert info(capsys, moved)["files"]["tokenizer.tinygpt"] == expected


@pytest.mark.parametrize("num_tensors", [0, 5])
def test_a_file_without_a_tensor_or_that_is_damaged_has_its_hash(capsys, tmp_path, num_tensors):
    """In a folder as by its own name."""
    content = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, 0)
    (path := tmp_path / "x.gguf").write_bytes(content)
    of_folder = info(capsys, tmp_path)
    of_file = info(capsys, path)
    assert of_folder["files"] == of_file["files"]
    assert of_file["files"] == {"x.gguf": {"size": 24, "sha256": hashlib.sha256(content).hexdigest()}}
    assert of_folder["content_hash"] == of_file["content_hash"]


def test_the_tokenizer(capsys, with_tokenizer):
    told = info(capsys, with_tokenizer)["tokenizer"]
    assert len(told.pop("outside_vocabulary")) == VOCAB_SIZE - tiny_checkpoint.V
    assert told == {"vocab_size": VOCAB_SIZE, "special_ids": [EOS], "error": None}


def test_a_converted_checkpoint_and_a_damaged_one(capsys, folder, tmp_path):
    target = tmp_path / "int8"
    assert cli.main(["convert", str(folder), str(target), "--dtype", "int8", "--threads", "1"]) == 0
    report = info(capsys, target)
    assert (report["converted_to"], report["tied"], report["refused"]) == ("int8", True, [])
    file = target / "model.tinygpt.safetensors"
    content = file.read_bytes()
    file.unlink()  # another file: this one is mapped into memory
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    report = info(capsys, target)
    assert "is damaged" in report["refused"][0]
    assert report["tensors"]


HOSTILE = "score.\x1b[2J\x07\x9b\u202e"
ESCAPED = "score.\\x1b[2J\\x07\\x9b\\u202e"


def test_names_in_files_do_not_steer_the_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "read_bandwidth", lambda threads: 1e10)
    folder = tmp_path / HOSTILE
    tensors = tiny_checkpoint.random_tensors()
    tiny_checkpoint.write_checkpoint(folder, tensors | {HOSTILE: np.zeros(3, np.float32)})
    assert info(capsys, folder)["ignored"] == [HOSTILE]
    for command in (["info"], ["info", "--json"], ["doctor"], ["convert", "--dtype", "float32"]):
        assert (
            cli.main([*command, str(folder), *([str(tmp_path / "x")] if "convert" in command else [])]) == 0
        )
        out, err = capsys.readouterr()
        assert all(character == "\n" or character.isprintable() for character in out + err)
        assert ESCAPED in out + err or command[1:] == ["--json"]
    assert ESCAPED in str(CheckpointError(f"{HOSTILE} is missing"))


def test_no_file_outside_the_folder_is_hashed_or_copied(capsys, with_tokenizer, tmp_path):
    (tmp_path / "secret").write_text("a secret")
    (with_tokenizer / "vocab.txt").symlink_to(tmp_path / "secret")  # not needed
    files = {"config.json", "model.safetensors", "vocab.json", "merges.txt"}
    assert info(capsys, with_tokenizer)["files"].keys() == files
    code = cli.main(["convert", str(with_tokenizer), str(tmp_path / "to"), "--to", "safetensors"])
    assert (code, (tmp_path / "to").exists()) == (2, False)
    assert "vocab.txt cannot be read: it is a link out of its folder" in capsys.readouterr().err


DAMAGES = {  # what is wrong -> how it became so
    "vocab.json is not valid JSON": lambda folder: os.truncate(folder / "vocab.json", 99),
    "vocab.json lacks 'qq'": lambda folder: (folder / "merges.txt").write_text("#version: 0.2\nq q\n"),
    "tokenizer_config.json": lambda folder: (folder / "tokenizer_config.json").mkdir(),
}


@pytest.fixture(params=DAMAGES)
def damaged(request, with_tokenizer, monkeypatch) -> tuple[Path, str]:
    """A folder with a damaged tokenizer, and what is wrong with it."""
    monkeypatch.setattr(hardware, "read_bandwidth", lambda threads: 1e9 * threads)
    DAMAGES[request.param](with_tokenizer)
    return with_tokenizer, request.param


@pytest.mark.parametrize("flags", [[], ["--to", "gguf"]])
def test_convert_refuses_a_damaged_tokenizer_and_writes_nothing(damaged, tmp_path, capsys, flags):
    folder, wrong = damaged
    assert cli.main(["convert", str(folder), str(tmp_path / "new"), *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert wrong in err
    assert [*tmp_path.iterdir()] == [folder]


def test_doctor_and_info_refuse_a_damaged_tokenizer(damaged, capsys):
    folder, wrong = damaged
    said = f'the tokenizer of {folder} cannot be used, only token ids: the report says why, under "refused".'
    assert cli.main(["info", "--json", str(folder)]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert wrong in report["tokenizer"]["error"]
    assert (report["refused"], err) == ([report["tokenizer"]["error"]], f"tinygpt: error: {said}\n")
    assert cli.main(["doctor", "--json", str(folder)]) == 1
    out, err = capsys.readouterr()
    checkpoint = json.loads(out)["checkpoint"]
    assert err.endswith(f"tinygpt: error: {said}\n")
    kept = ("path", "container", "family", "quirks", "content_hash", "converted_to", "refused")
    assert checkpoint == {name: report[name] for name in kept} | {"tokenizer_error": report["refused"][0]}
    for command in ("info", "doctor"):  # the text says it once
        assert cli.main([command, str(folder)]) == 1
        out = capsys.readouterr().out
        assert out.count(wrong) == out.count('see "refused"') == 1


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_a_checkpoint_without_a_tokenizer_is_not_refused(folder, capsys, monkeypatch, command):
    monkeypatch.setattr(hardware, "read_bandwidth", lambda threads: 1e9 * threads)
    lines = text(capsys, command, folder)
    assert any("error" in line and "has no tokenizer that can be used" in line for line in lines)
    assert "nothing" in lines if command == "info" else "refused none" in lines


def with_added(folder: Path, count: int) -> Path:
    return tiny_checkpoint.write_with_demo_tokenizer(
        folder, {f"<extra {i}>": VOCAB_SIZE + i for i in range(count)}
    )


def test_a_text_to_calibrate_on_that_holds_such_a_token_is_refused(tmp_path, capsys):
    (text := tmp_path / "text").write_text("Once upon a time <extra 0> there was a king.")
    folder = with_added(tmp_path / "one", 1)
    assert cli.main(["convert", str(folder), str(tmp_path / "new"), "--calibrate", str(text)]) == 2
    assert f"token id {VOCAB_SIZE} is outside the vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
