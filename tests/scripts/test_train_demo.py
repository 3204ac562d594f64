"""scripts/train_demo.py, in small, on the CPU: what it writes, how it goes on, and what it refuses."""

import json
import lzma
import random
import sys
from pathlib import Path

import pytest

from support.recorded import MISSING
from support.tables import rows

pytest.importorskip("transformers", reason=MISSING)

import torch

from scripts import train_demo
from scripts.train_demo import Windows
from support.paths import ROOT
from tinygpt import LLM

MARK = "<|endoftext|>"
SMALL = "--merges 300 --layers 2 --width 32 --heads 2 --positions 64 --batch-tokens 512 --warmup-steps 5 --device cpu"
NOTE = ["--corpus-note", "no TinyStories at all"]
SETTINGS = [*SMALL.split(), *NOTE, "--learning-rate", "3e-3", "--evaluations", "2"]


def tale(generator: random.Random) -> str:
    """Words of two syllables of few, in sentences: something to merge, and something to learn."""
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "un", "éa")]
    words = ["".join(generator.choices(syllables[: 8 + 8 * (i % 8)], k=2)) for i in range(120)]
    return " ".join(f"{generator.choice(words)} and {generator.choice(words)}." for _ in range(150))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    train = MARK.join(tale(generator) for _ in range(12))
    (folder / "train.txt.xz").write_bytes(lzma.compress(train.encode()))
    (folder / "val.txt").write_text(
        MARK.join(tale(generator) for _ in range(2)), encoding="utf-8", newline=""
    )
    return folder


def run(corpus: Path, out: Path, *more: str) -> None:
    """Run in this process, which loads torch and transformers once."""
    words = ["train_demo.py", "--corpus", str(corpus), "--out", str(out), *SETTINGS, *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        train_demo.run(train_demo.parse_arguments())


@pytest.fixture(scope="module")
def out(corpus, tmp_path_factory):
    """A finished run of 20 steps."""
    out = tmp_path_factory.mktemp("trained")
    run(corpus, out, "--tokens", "10240")
    return out


def record_of(out: Path) -> dict:
    return json.loads((out / "training.json").read_text(encoding="utf-8"))


def test_resuming_goes_on_where_the_run_stopped_and_keeps_the_best_weights(out, corpus, monkeypatch):
    before = record_of(out)
    run(corpus, out, "--tokens", "15360", "--resume")
    after = record_of(out)
    weights = (out / "model.safetensors").read_bytes()
    assert after["tokens_seen"] == 15360
    assert after["validation_loss"] < before["validation_loss"]
    mean_loss = train_demo.mean_loss
    monkeypatch.setattr(train_demo, "mean_loss", lambda *given, **names: 2 * mean_loss(*given, **names))
    run(corpus, out, "--tokens", "16384", "--resume")
    assert record_of(out)["validation_loss"] == after["validation_loss"]
    assert (out / "model.safetensors").read_bytes() == weights


def test_windows_cover_the_text_and_shift_by_less_than_their_size():
    token_ids = torch.arange(1000)
    windows = [Windows(token_ids, 10, 99)[i] for i in range(99)]
    assert torch.equal(torch.cat([window["input_ids"] for window in windows]), token_ids[:990])
    assert torch.equal(torch.cat([window["labels"] for window in windows]), token_ids[1:991])
    shifts = set()
    for i, window in enumerate([Windows(token_ids, 10, 98, is_shifted=True)[i] for i in range(98)]):
        assert torch.equal(window["input_ids"] + 1, window["labels"])
        shifts.add(window["input_ids"][0].item() - 10 * i)
    assert shifts == set(range(10))


def test_ctrl_c_keeps_the_best_weights_so_far(corpus, tmp_path, monkeypatch):
    mean_loss, calls = train_demo.mean_loss, []

    def interrupted(*arguments, **names):
        calls.append(arguments)
        if len(calls) == 15:  # after 10 steps and 4 batches of the first evaluation
            raise KeyboardInterrupt
        return mean_loss(*arguments, **names)

    monkeypatch.setattr(train_demo, "mean_loss", interrupted)
    run(corpus, tmp_path, "--tokens", "10240")
    record = record_of(tmp_path)
    assert (record["tokens_seen"], len(calls)) == (10 * 512, 15)
    with LLM(tmp_path) as llm:
        assert llm.config.n_layer == 2
    calls[:] = [None] * 14
    with pytest.raises(SystemExit, match="ended before its first evaluation"):
        run(corpus, tmp_path / "other", "--tokens", "10240")


def test_the_tokenizer_has_gpt2s_form(out, corpus):
    from transformers import GPT2Tokenizer

    text = (corpus / "val.txt").read_text(encoding="utf-8").split(MARK)[0]
    with LLM(out) as llm:
        token_ids = llm.tokenizer.encode(text)
        assert llm.tokenizer.decode(token_ids) == text
    assert token_ids == GPT2Tokenizer.from_pretrained(out).encode(text)
    vocabulary = json.loads((out / "vocab.json").read_text(encoding="utf-8"))
    assert (vocabulary[MARK], len(vocabulary), vocabulary["!"]) == (556, 557, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    rows("""
["--resume"] | holds no run: omit --resume
["--corpus", "scripts"] | scripts/train.txt.xz cannot be read
["--positions", "16384", "--batch-tokens", "16384"] | the corpus has less tokens than a step takes
"""),
)
def test_impossible_settings_are_refused(corpus, tmp_path, change, reason, monkeypatch, capsys):
    command = ["train_demo.py", "--corpus", str(corpus), "--out", str(tmp_path / "out"), *SETTINGS, *change]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        train_demo.run(train_demo.parse_arguments())
    assert reason in capsys.readouterr().err + str(ended.value)
