"""`tinygpt info`, and `tinygpt doctor CHECKPOINT`: the content of a checkpoint, and all that is wrong with one."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from support import foreign, tiny_checkpoint
from support.gguf_writer import gguf_bytes
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


def test_what_another_program_wrote(capsys, tmp_path):
    path = foreign.nanogpt(tmp_path / "out", tiny_checkpoint.random_tensors(prefix=""))
    report = info(capsys, path)
    assert (report["container"], report["family"], report["refused"]) == ("torch zip", "nanoGPT", [])
    assert report["quirks"] == ["activation_function is gelu, which the checkpoint does not say"]
    assert report["config"]["n_embd"] == tiny_checkpoint.C
    assert [*report["files"]] == ["ckpt.pt"]
    assert "optimizer.state.0.exp_avg" in report["ignored"]
    assert {"container torch zip", "family nanoGPT"} <= {*text(capsys, "info", path)}


def test_a_head_of_its_own_and_ignored_tensors(capsys, tmp_path):
    tensors = tiny_checkpoint.random_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.int16)
    report = info(capsys, tiny_checkpoint.write_checkpoint(tmp_path / "tiny", tensors))
    assert report["tied"] is False
    assert report["ignored"] == ["transformer.h.0.attn.bias"]
    assert report["tensors"]["transformer.h.0.attn.bias"]["size"] == 2 * 36
    assert report["refused"] == []


def test_everything_that_is_wrong_is_said_at_once(capsys, tmp_path):
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny", n_head=3, activation_function="selu")
    (folder / "model.safetensors").write_bytes(b"not weights")
    report = info(capsys, folder)
    config, weights = report["refused"]
    assert "selu" in config
    assert "model.safetensors is a damaged safetensors file" in weights
    assert report["config"] is report["tied"] is report["ignored"] is None
    assert report["tensors"] == {}
    assert "model.safetensors" in report["files"]
    assert "no tokenizer" in report["tokenizer"]["error"]
    assert cli.main(["info", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert err.endswith('cannot be used: the report says why, under "refused".\n')
    assert "activation_function is 'selu'" in out.partition("\nrefused\n")[2]
    assert "unknown" in out


def test_tensors_that_are_not_the_configs(capsys, tmp_path):
    tensors = tiny_checkpoint.random_tensors()
    del tensors["transformer.ln_f.bias"]
    folder = tiny_checkpoint.write_checkpoint(tmp_path / "tiny", tensors, n_positions=5)
    report = info(capsys, folder)
    (refused,) = report["refused"]
    assert "missing: ln_f.bias" in refused
    assert "wpe.weight is (6, 8)" in refused
    assert report["config"]["n_positions"] == 5
    assert report["tied"] is None
    assert "transformer.wpe.weight" in report["tensors"]


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


FORMS = {
    "gguf": "blk.*.ffn_up.weight",
    "openai_tf": "model/h*/mlp/c_fc/w",
    "megatron": "mp_rank_00/model.language_model.encoder.layers.*.mlp.dense_h_to_4h.weight",
}


@pytest.mark.parametrize("form", FORMS)
def test_text_groups_what_layers_share_in_other_programs_files(capsys, tmp_path, form):
    path = foreign.WRITERS[form](tmp_path / "there", tiny_checkpoint.random_tensors(prefix=""))
    lines = [line.split() for line in text(capsys, "info", path)]
    assert [line[-3:] for line in lines if line[:1] == [FORMS[form]]] == [["x", "640", "B"]]


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


def test_sizes_of_blocks_are_those_in_the_file(capsys, tmp_path):
    blocks = {"a": ((64,), 2, bytes(36)), "b": ((256,), 14, bytes(210))}
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(foreign.GGUF_KEYS, blocks))
    tensors = info(capsys, tmp_path / "x.gguf")["tensors"]
    assert [(tensor["dtype"], tensor["size"]) for tensor in tensors.values()] == [("Q4_0", 36), ("Q6_K", 210)]


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


@pytest.mark.parametrize("flags", [[], ["--dtype", "float8"], ["--to", "gguf"]])
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


@pytest.mark.parametrize("count", [0, 1, 7])
def test_tokens_without_a_row_of_the_embedding_are_listed(tmp_path, capsys, count):
    folder = with_added(tmp_path / "added", count)
    outside = info(capsys, folder)["tokenizer"]["outside_vocabulary"]
    assert outside == [{"id": VOCAB_SIZE + i, "text": f"<extra {i}>"} for i in range(count)]
    lines = [line for line in text(capsys, "info", folder) if "outside_vocabulary" in line]
    assert len(lines) == (count > 0)
    assert all(f"{VOCAB_SIZE} '<extra 0>'" in line and ("2 more" in line) == (count == 7) for line in lines)


def test_a_text_to_calibrate_on_that_holds_such_a_token_is_refused(tmp_path, capsys):
    (text := tmp_path / "text").write_text("Once upon a time <extra 0> there was a king.")
    folder = with_added(tmp_path / "one", 1)
    assert cli.main(["convert", str(folder), str(tmp_path / "new"), "--calibrate", str(text)]) == 2
    assert f"token id {VOCAB_SIZE} is outside the vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
