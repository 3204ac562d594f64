"""`tinygpt parity`: it passes where engines agree, and sees every kind of difference where they do not."""

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.golden_models import golden_ids, write_model
from support.recorded import HAS_TRANSFORMERS, needs_transformers
from tinygpt import LLM, SamplingParams
from tinygpt.cli import main as cli
from tinygpt.evaluation.parity import Difference, Golden, compare, load_goldens, save_goldens

SIZES = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_positions": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("parity") / "model", **SIZES)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*range(0, SIZES["vocab_size"], 2)]})
    )
    return folder


@pytest.fixture(scope="module")
def golden(folder) -> Path:
    """A golden file of prompts as long as the built-in ones; without transformers, the reference backend's."""
    path = folder.parent / "golden.npz"
    if HAS_TRANSFORMERS:
        assert (
            cli.main(["parity", str(folder), "--layers", "--max-tokens", "6", "--save-golden", str(path)])
            == 0
        )
        return path
    with LLM(str(folder), device="reference") as llm:
        save_goldens(
            path, [golden_of(llm, golden_ids(length, vocab_size=97)) for length in (1, 2, 7, 33, 64)]
        )
    return path


def golden_of(llm: LLM, prompt: list[int]) -> Golden:
    count = min(6, SIZES["n_positions"] - len(prompt))
    greedy_ids = []
    if count:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        greedy_ids = llm.generate([prompt], params)[0].outputs[0].token_ids
    best = np.sort(llm.logits(prompt + greedy_ids)[len(prompt) - 1 :][:count])  # (G, V)
    leads = (best[:, -1] - best[:, -2]).tolist()
    return Golden(prompt, llm.logits(prompt), greedy_ids, leads, llm.hidden_states(prompt))


def parity(capsys, *arguments: object) -> tuple[int, dict]:
    capsys.readouterr()
    code = cli.main(["parity", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def say_no(capsys, *arguments: object) -> str:
    """The sentence of a run that does nothing."""
    capsys.readouterr()
    assert cli.main(["parity", *map(str, arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err


@needs_transformers
def test_with_transformers(capsys, folder):
    code, report = parity(capsys, folder, "--max-tokens", 9)
    assert code == 0
    assert report["passed"] is True
    assert report["compared_with"] == "transformers"
    assert report["tolerance"] == 1e-4
    assert 0 < report["logits"]["mean"] < report["logits"]["largest"] < 1e-4
    assert report["top_1"] == 1
    assert report["num_prompts"] == 5
    assert report["num_positions"] == 1 + 2 + 7 + 33 + 64
    assert report["num_greedy_tokens"] == 4 * 9  # the longest prompt leaves no room
    assert report["divergences"] == report["failures"] == []
    assert list(report["by_position"]) == ["0", "1", "2", "4", "8", "16", "32"]
    assert report["by_layer"] is None


def test_a_tolerance_that_no_float32_meets(capsys, folder, golden):
    code, report = parity(capsys, folder, "--golden", golden, "--tolerance", 0)
    assert code == 1
    assert report["passed"] is False
    assert "and the tolerance is 0" in report["failures"][0]
    assert cli.main(["parity", str(folder), "--golden", str(golden), "--tolerance", "0"]) == 1
    assert "tinygpt: error: no parity:" in capsys.readouterr().err


def test_with_a_golden_file_and_without_transformers(capsys, monkeypatch, folder, golden):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, report = parity(capsys, folder, "--golden", golden, "--layers")
    assert code == 0
    assert report["compared_with"] == str(golden)
    assert report["num_greedy_tokens"] == 4 * 6
    assert len(report["by_layer"]) == SIZES["n_layer"] + 1
    assert all(layer["largest"] < 1e-4 for layer in report["by_layer"])
    advice = 'pip install "tinygpt[parity]", or give --golden'
    assert advice in say_no(capsys, folder)


def change(golden: Path, target: Path, **fields) -> Path:
    """The golden file with other fields in its third prompt, of 7 tokens."""
    goldens = load_goldens(golden)
    goldens[2] = replace(goldens[2], **fields)
    save_goldens(target, goldens)
    return target


def test_one_wrong_logit(capsys, folder, golden, tmp_path):
    logits = load_goldens(golden)[2].logits.copy()
    logits[5, 3] -= 0.25
    code, report = parity(capsys, folder, "--golden", change(golden, tmp_path / "changed", logits=logits))
    assert code == 1
    assert report["logits"]["largest"] == pytest.approx(0.25, abs=1e-3)
    worst = max(report["by_position"], key=lambda start: report["by_position"][start]["largest"])
    assert worst == "4"
    assert len(report["failures"]) == 1


@pytest.mark.parametrize(("lead", "code"), [(0.5, 1), (1e-4, 0)])
def test_one_wrong_greedy_token(capsys, folder, golden, tmp_path, lead, code):
    made = load_goldens(golden)[2]
    wrong = (made.greedy_ids[4] + 1) % SIZES["vocab_size"]
    greedy_ids = [*made.greedy_ids[:4], wrong, wrong]
    leads = [*made.greedy_leads[:4], lead, lead]
    changed = change(golden, tmp_path / "changed", greedy_ids=greedy_ids, greedy_leads=leads)
    found, report = parity(capsys, folder, "--golden", changed)
    assert found == code
    (found,) = report["divergences"]
    assert found == {"prompt": 2, "index": 4, "token_id": made.greedy_ids[4], "expected": wrong, "lead": lead}
    assert bool(report["failures"]) is bool(code)


def test_one_wrong_layer(capsys, folder, golden, tmp_path):
    states = load_goldens(golden)[2].hidden_states.copy()
    states[1] += 2
    changed = change(golden, tmp_path / "changed", hidden_states=states)
    _, report = parity(capsys, folder, "--golden", changed, "--layers")
    assert [layer["largest"] > 1 for layer in report["by_layer"]] == [False, True, False]


@needs_transformers
def test_prompts_of_a_file(capsys, folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [4]}\n')
    code, report = parity(capsys, folder, "--input", file, "--max-tokens", 0)
    assert (code, report["num_positions"], report["num_greedy_tokens"]) == (0, 4, 0)


def test_prompts_that_cannot_be_used(capsys, folder, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [[1], [], [97], [0] * 65, "text", [97] * 64]
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    message = say_no(capsys, folder, "--input", file)
    assert "5 lines" in message
    for number in (2, 3, 4, 5, 6):
        assert f"line {number}: " in message


def test_text(capsys, folder, golden):
    assert cli.main(["parity", str(folder), "--golden", str(golden), "--layers"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "top-1 agreement 100.00%" in lines
    assert "passed yes" in lines
    assert any(line.startswith("after ln_f ") for line in lines)
    assert "by layer (for information, no tolerance)" in lines
    assert any(line.startswith("from 32 ") for line in lines)


def test_golden_files_that_cannot_be_used(capsys, folder, golden, tmp_path):
    data = golden.read_bytes()
    file = tmp_path / "damaged.npz"
    for damaged in (
        data[:-100],
        data[50:],
        b"no archive",
    ):  # the directory of the second begins in front of the file
        file.write_bytes(damaged)
        assert "is no file of --save-golden" in say_no(capsys, folder, "--golden", file)
    for name, value in {"logits.0": np.zeros((1, 97)), "token_ids.0": [1.5], "greedy_leads.0": 1}.items():
        np.savez(file, **{**np.load(golden), name: value})
        assert "is no file of --save-golden" in say_no(capsys, folder, "--golden", file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("format.npy", zipfile.ZipFile(golden).read("format.npy"))
        archive.writestr("token_ids.0.npy", b"no array")
    assert "is no file of --save-golden" in say_no(capsys, folder, "--golden", file)
    shorter = change(golden, tmp_path / "shorter.npz", logits=np.zeros((7, 96), np.float32))
    assert "is of another model" in say_no(capsys, folder, "--golden", shorter)
    stateless = change(golden, tmp_path / "stateless.npz", hidden_states=None)
    assert "make it with --layers too" in say_no(capsys, folder, "--golden", stateless, "--layers")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_converted_checkpoint_needs_a_golden_file(capsys, folder, golden, tmp_path, dtype):
    target = tmp_path / "converted"
    assert cli.main(["convert", str(folder), str(target), "--dtype", dtype]) == 0
    refusal = say_no(capsys, target)
    assert refusal.startswith(
        f"tinygpt: error: transformers cannot read {target}, which tinygpt has converted: "
    )
    assert refusal.count("\n") == 1
    code, report = parity(capsys, target, "--golden", golden, "--dtype", "auto")
    assert report["dtype"] == dtype
    assert code == 0 or dtype != "float32"


def test_a_checkpoint_in_another_format_needs_one_too(capsys, folder, tmp_path):
    assert cli.main(["convert", str(folder), str(tmp_path / "gguf"), "--to", "gguf"]) == 0
    for name in (tmp_path / "gguf", tmp_path / "gguf" / "model.gguf"):
        assert f"transformers cannot read {name}, which is not in its format: give --golden" in say_no(
            capsys, name
        )


@needs_transformers
def test_names_that_transformers_does_not_know(capsys, tmp_path):
    file = write_model(tmp_path, **SIZES) / "model.safetensors"
    save_file({f"module.{name}": array for name, array in load_file(file).items()}, file)
    assert cli.main(["parity", str(tmp_path)]) == 2
    assert "would initialize them at random" in capsys.readouterr().err


def test_goldens_come_back_as_they_were(golden, tmp_path):
    made = load_goldens(golden)[2]
    save_goldens(tmp_path / "again", [made])
    (again,) = load_goldens(tmp_path / "again")
    for name, value in vars(made).items():
        np.testing.assert_array_equal(
            getattr(again, name), value, strict=isinstance(value, np.ndarray), err_msg=name
        )


def test_agreements():
    expected = np.arange(40, dtype=np.float32)[None].repeat(2, 0)
    ours = expected.copy()
    ours[1, 0] = 100.0  # is now the first, and pushes 20 out of the best 20
    result = compare([Golden([0, 0], expected, [], [], None)], [ours], [[]])
    assert result.top_1 == 0.5
    assert result.top_20 == pytest.approx((1 + 19 / 20) / 2)
    assert result.logits == Difference(100.0, 100 / 80)
    assert result.by_position == {0: Difference(0.0, 0.0), 1: Difference(100.0, 2.5)}


def test_not_a_number_is_no_parity():
    logits = np.zeros((1, 4), np.float32)
    broken = logits.copy()
    broken[0, 2] = np.nan
    result = compare([Golden([0], logits, [], [], None)], [broken], [[]])
    assert result.failures(1.0) == ["a logit differs by nan and the tolerance is 1."]
