"""scripts/train_demo.py, in small, on the CPU: what it writes, how it goes on, and what it refuses."""

import contextlib
import io
import json
import lzma
import random
import re
import runpy
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from support.recorded import MISSING

pytest.importorskip("transformers", reason=MISSING)

import torch

from scripts import train_demo
from scripts.train_demo import GPT, Batches, Trainer, validate
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
    folder, generator = tmp_path_factory.mktemp("corpus"), random.Random(0)
    train = MARK.join(tale(generator) for _ in range(12))
    (folder / "train.txt.xz").write_bytes(lzma.compress(train.encode()))
    (folder / "val.txt").write_text(MARK.join(tale(generator) for _ in range(2)), encoding="utf-8", newline="")
    return folder


def run(corpus: Path, out: Path, *more: str) -> str:
    """Return the printed text of a run in this process, which loads torch and transformers once."""
    words = ["train_demo.py", "--corpus", str(corpus), "--out", str(out), *SETTINGS, *more]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", words)
        try:
            train_demo.run(train_demo.parse_arguments())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A finished run of 40 steps, and what it printed."""
    out = tmp_path_factory.mktemp("trained")
    return out, run(corpus, out, "--tokens", "10240")


def record_of(out: Path) -> dict:
    return json.loads((out / "training.json").read_text(encoding="utf-8"))


def test_tinygpt_computes_the_logits_that_transformers_does(trained):
    from transformers import GPT2LMHeadModel

    out, _ = trained
    token_ids = list(range(0, 240, 4))
    theirs = GPT2LMHeadModel.from_pretrained(out)
    assert theirs.config.eos_token_id == theirs.config.vocab_size - 1
    with torch.inference_mode(), LLM(str(out)) as llm:
        expected = theirs(torch.tensor([token_ids])).logits[0].numpy()
        np.testing.assert_allclose(llm.logits(token_ids), expected, atol=1e-4, rtol=0)


def test_embedded_it_keeps_what_its_card_says(trained, tmp_path):
    out, _ = trained
    runpy.run_path(str(ROOT / "scripts" / "embed_demo.py"))["embed"](out, tmp_path)
    facts = record_of(out)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"| 0.0 million tokens of it, {10240 / facts['corpus_tokens']:.1f} passes," in card
    assert f"{facts['validation_loss']:.3f} per token, {facts['bits_per_byte']:.3f} bits per byte" in card
    assert "windows of 64" in card
    with LLM(str(tmp_path)) as llm:
        assert llm.config.vocab_size == 557


def test_the_loss_falls_and_the_record_says_how_far(trained):
    out, printed = trained
    losses = [float(loss) for loss in re.findall(r", validation (\S+)", printed)]
    assert losses[-1] < losses[0] < 6.5  # ln 557 is 6.32
    record = record_of(out)
    assert record["validation_loss"] == pytest.approx(min(losses), abs=1e-4)
    assert (record["tokens_seen"], record["window"]) == (10240, 64)
    assert f"python scripts/embed_demo.py {out}" in printed


def test_resuming_goes_on_where_the_run_stopped_and_keeps_the_best_weights(trained, corpus):
    out, _ = trained
    before = record_of(out)
    printed = run(corpus, out, "--tokens", "15360", "--resume", "--minutes", "30")
    assert "continuing after 10240 tokens" in printed
    after, weights = record_of(out), (out / "model.safetensors").read_bytes()
    assert after["tokens_seen"] == 15360
    assert after["validation_loss"] < before["validation_loss"]
    run(corpus, out, "--tokens", "15872", "--resume", "--learning-rate", "1e6")
    assert record_of(out)["validation_loss"] == after["validation_loss"]
    assert (out / "model.safetensors").read_bytes() == weights
    with pytest.raises(SystemExit, match="started with --seed 0"):
        run(corpus, out, "--tokens", "15360", "--resume", "--seed", "7")


def test_a_pass_shows_every_window_once_and_the_next_one_in_another_order():
    batches = Batches(torch.arange(1000), size=10, num_windows=7, seed=1)
    assert batches.steps_per_pass == 99 // 7
    steps = range(batches.steps_per_pass)
    passes = [[batches.of_step(number * batches.steps_per_pass + step) for step in steps] for number in range(2)]
    for shown in passes:
        windows = torch.cat(shown)
        assert windows.shape == (98, 11)
        assert (windows.diff() == 1).all()
        assert len(set(windows[:, 0].tolist())) == 98
        assert len(set((windows[:, 0] % 10).tolist())) == 1
    assert not torch.equal(passes[0][0], passes[1][0])
    assert torch.equal(Batches(torch.arange(1000), 10, 7, 1).of_step(3), passes[0][3])


def test_the_tokenizer_has_gpt2s_form(trained, corpus):
    from transformers import GPT2Tokenizer

    out, _ = trained
    text = (corpus / "val.txt").read_text(encoding="utf-8").split(MARK)[0]
    with LLM(str(out)) as llm:
        token_ids = llm.tokenizer.encode(text)
        assert llm.tokenizer.decode(token_ids) == text
    assert token_ids == GPT2Tokenizer.from_pretrained(out).encode(text)
    vocabulary = json.loads((out / "vocab.json").read_text(encoding="utf-8"))
    assert (vocabulary[MARK], len(vocabulary), vocabulary["!"]) == (556, 557, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--heads", "3"], "--width must be a multiple of --heads"),
        (["--batch-tokens", "100"], "--batch-tokens of --positions"),
        (["--resume"], "holds no run: omit --resume"),
        (["--corpus", "scripts"], "holds no train.txt.xz and no val.txt"),
        (["--minutes", "0.01"], "--minutes is 0.01: starting and validating takes longer"),
    ],
)
def test_impossible_settings_are_refused(corpus, tmp_path, change, reason, monkeypatch, capsys):
    command = ["train_demo.py", "--corpus", str(corpus), "--out", str(tmp_path / "out"), *SETTINGS, *change]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        train_demo.run(train_demo.parse_arguments())
    assert reason in capsys.readouterr().err + str(ended.value)


def small_trainer(**fields) -> Trainer:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    token_ids = torch.randint(50, (500,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    fixed = {"tokens": 10**12, "learning_rate": 1e-2, "warmup_steps": 4}
    return Trainer(GPT(config), Batches(token_ids, 16, 4, 0), **{**fixed, **fields})


def test_a_run_ends_with_the_step_in_which_it_is_asked_to():
    trainer, seen = small_trainer(is_ending=True), []
    trainer.run(trainer.model, lambda progress, loss: seen.append(progress), evaluations=1)
    assert (trainer.step, seen) == (1, [1.0])


def test_minutes_end_a_run_that_has_tokens_left():
    trainer, seen = small_trainer(deadline=time.monotonic() + 1), []
    trainer.run(trainer.model, lambda progress, loss: seen.append(progress), evaluations=1)
    assert time.monotonic() < trainer.deadline + 30
    assert 0 < trainer.tokens_seen < 10**9
    assert trainer.progress(time.monotonic() - 1, step_seconds=1e9) == 1


def test_bfloat16_changes_the_products_alone():
    plain, rounded = (small_trainer(bfloat16=is_asked) for is_asked in (False, True))
    losses = [trainer.loss_of(trainer.model.eval(), trainer.batches.of_step(0)).item() for trainer in (plain, rounded)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_the_learning_rate_rises_then_falls_to_nothing():
    trainer, rates = small_trainer(), []
    for trainer.step in range(41):
        rates.append(trainer.rate(trainer.step / 40))
    assert rates[:4] == pytest.approx([1e-2 * (s + 1) / 4 * 0.5 * (1 + np.cos(np.pi * s / 40)) for s in range(4)])
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[40] == 0


def test_matrices_alone_decay():
    decaying, free = small_trainer().optimizer.param_groups
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.1, 0)
    assert all(p.dim() == 2 for p in decaying["params"])
    assert all(p.dim() == 1 for p in free["params"])


def test_validation_predicts_each_token_once_from_its_window():
    trainer = small_trainer()
    token_ids, model = trainer.batches.token_ids[:40], trainer.model.eval()  # windows of 16, 16 and 7
    nats = sum(
        torch.nn.functional.cross_entropy(model(token_ids[None, a:b])[0], token_ids[a + 1 : b + 1], reduction="sum")
        for a, b in ((0, 16), (16, 32), (32, 39))
    )
    assert validate(model, token_ids, 16) == pytest.approx(nats.item() / 39, rel=1e-5)
