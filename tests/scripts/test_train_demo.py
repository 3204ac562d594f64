"""scripts/train_demo.py, in small, on the CPU: what it writes, how it goes on, and what it refuses."""

import json
import lzma
import random
import re
import runpy
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from support.recorded import MISSING

pytest.importorskip("transformers", reason=MISSING)

import torch

from scripts.train.corpus import CorpusError, check_folder, read_documents
from scripts.train.loop import Batches, Plan, Trainer
from scripts.train.model import GPT, write_config, write_weights
from scripts.train.start import sizes_of
from scripts.train.validation import validate
from support.paths import ROOT
from tinygpt import LLM
from tinygpt.weights.config import ModelConfig

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


def run(corpus: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/train_demo.py", "--corpus", str(corpus), "--out", str(out), *SETTINGS, *more]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A finished run of 40 steps, and what it printed."""
    out = tmp_path_factory.mktemp("trained")
    result = run(corpus, out, "--tokens", "20480")
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_tinygpt_computes_the_logits_that_transformers_does(trained):
    from transformers import GPT2LMHeadModel

    out, _ = trained
    token_ids = list(range(0, 240, 4))
    theirs = GPT2LMHeadModel.from_pretrained(out)
    assert theirs.config.eos_token_id == theirs.config.vocab_size - 1
    with torch.inference_mode(), LLM(str(out)) as llm:
        expected = theirs(torch.tensor([token_ids])).logits[0].numpy()
        np.testing.assert_allclose(llm.logits(token_ids), expected, atol=1e-4, rtol=0)


def test_what_is_trained_is_what_transformers_computes(tmp_path):
    from transformers import GPT2LMHeadModel

    model = small_trainer(deadline=1.0, tokens=1).model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # large enough for each of GPT-2's functions to show
    write_config(model.config, tmp_path)
    write_weights(model, tmp_path)
    token_ids = torch.arange(16)[None]
    with torch.inference_mode():
        expected = GPT2LMHeadModel.from_pretrained(tmp_path)(token_ids).logits
        torch.testing.assert_close(model(token_ids), expected, atol=1e-5, rtol=1e-5)


def test_tokenizer_is_gpt2s_form(trained, corpus):
    from transformers import GPT2Tokenizer

    out, _ = trained
    text = read_documents(corpus / "val.txt")[0]
    with LLM(str(out)) as llm:
        token_ids = llm.tokenizer.encode(text)
        assert llm.tokenizer.decode(token_ids) == text
    assert token_ids == GPT2Tokenizer.from_pretrained(out).encode(text)
    vocabulary = json.loads((out / "vocab.json").read_text(encoding="utf-8"))
    assert vocabulary[MARK] == len(vocabulary) - 1 == 556
    assert vocabulary["!"] == 0


def test_loss_falls_and_the_card_says_how_far(trained):
    out, printed = trained
    losses = [float(loss) for loss in re.findall(r", validation (\S+)", printed)]
    assert losses[1] < losses[0] < 6.3  # ln 557 is 6.32
    facts = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert facts["validation_loss"] == pytest.approx(min(losses), abs=1e-4)
    assert facts["tokens_seen"] == 20480
    assert f"{facts['bits_per_byte']:.3f} bits per byte" in (out / "README.md").read_text(encoding="utf-8")
    assert f"python scripts/embed_demo.py {out}" in printed


def test_embedded_it_keeps_what_its_card_says(trained, tmp_path):
    out, _ = trained
    runpy.run_path(str(ROOT / "scripts" / "embed_demo.py"))["embed"](out, tmp_path)
    facts = json.loads((out / "training.json").read_text(encoding="utf-8"))
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"| 0.0 million tokens of it, {20480 / facts['corpus_tokens']:.1f} passes," in card
    assert f"{facts['validation_loss']:.3f} per token, {facts['bits_per_byte']:.3f} bits per byte" in card
    assert "windows of 64" in card
    with LLM(str(tmp_path)) as llm:
        assert llm.config.vocab_size == 557


def test_resuming_goes_on_where_the_run_stopped(trained, corpus):
    out, _ = trained
    before = json.loads((out / "training.json").read_text())
    refused = run(corpus, out, "--tokens", "25600")
    assert refused.returncode == 2
    assert "add --resume" in refused.stderr
    other = run(corpus, out, "--tokens", "25600", "--resume", "--seed", "7")
    assert other.returncode == 1
    assert "started with --seed 0" in other.stderr
    result = run(corpus, out, "--tokens", "25600", "--resume", "--minutes", "30")
    assert result.returncode == 0, result.stderr
    assert "going on after 20480 tokens" in result.stdout
    after = json.loads((out / "training.json").read_text())
    assert after["tokens_seen"] == 25600
    assert after["validation_loss"] < before["validation_loss"]


def test_a_run_begins_with_a_checkpoint_and_keeps_it_where_nothing_is_better(trained, corpus, tmp_path):
    out, _ = trained
    far_too_fast = ["--tokens", "512", "--learning-rate", "3"]
    result = run(corpus, tmp_path / "out", "--init", str(out), *far_too_fast)
    assert result.returncode == 0, result.stderr
    facts, before = (json.loads((folder / "training.json").read_text()) for folder in (tmp_path / "out", out))
    assert f"begins with validation {before['validation_loss']:.4f} per token" in result.stdout
    assert facts["validation_loss"] == pytest.approx(before["validation_loss"], abs=1e-6)
    assert (facts["tokens_seen"], facts["tokens_seen_before"]) == (512, before["tokens_seen"])
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()
    with LLM(str(out)) as one, LLM(str(tmp_path / "out")) as other:
        assert (one.logits([1, 2, 3]) == other.logits([1, 2, 3])).all()
    resumed = run(corpus, tmp_path / "out", "--resume", *far_too_fast)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == facts


def test_sizes_are_those_of_the_checkpoint(trained, corpus, tmp_path):
    out, _ = trained
    assert sizes_of(out) == {"merges": 300, "layers": 2, "width": 32, "heads": 2, "positions": 64}
    command = ["scripts/train_demo.py", "--corpus", str(corpus), "--out", str(out), *NOTE, "--resume"]
    environment = {"cwd": ROOT, "env": {"PYTHONPATH": "."}, "capture_output": True, "text": True, "timeout": 120}
    resumed = subprocess.run(
        [sys.executable, *command, "--tokens", "512", "--batch-tokens", "512", "--device", "cpu"], **environment
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after" in resumed.stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--layers", "3"], "--layers is 3 and"),
        (["--resume"], "--init begins a run and --resume goes on with one: give one of them."),
        ([], "has no config.json and no model.safetensors"),
    ],
)
def test_an_impossible_beginning_is_refused(trained, corpus, tmp_path, change, reason):
    out = trained[0] if change else tmp_path
    result = run(corpus, tmp_path / "out", "--init", str(out), *change)
    assert result.returncode == 2
    assert reason in result.stderr


def test_another_architecture_is_no_beginning(trained, tmp_path):
    for name in ("model.safetensors", "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((trained[0] / name).read_bytes())
    values = json.loads((trained[0] / "config.json").read_text()) | {"scale_attn_by_inverse_layer_idx": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CorpusError, match="differs from GPT-2 in more than its sizes"):
        sizes_of(tmp_path)


def test_a_run_that_is_asked_to_end_keeps_what_it_has():
    trainer, kept = small_trainer(deadline=float("inf"), tokens=10**12), []
    trainer.end()
    trainer.run(lambda: validate(trainer.model, trainer.batches.token_ids, 1), kept.append, print)
    assert (trainer.step, kept) == (1, [True])


def test_products_are_in_bfloat16_where_that_is_asked_for():
    losses = []
    for is_asked in (False, True):
        trainer = small_trainer(deadline=1.0, tokens=1)
        trainer.bfloat16 = is_asked
        losses.append(trainer.loss_of(trainer.model, trainer.batches.of_step(0)).item())
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_model_is_compiled_where_that_is_asked_for_and_trained_without_where_it_fails(monkeypatch):
    def fail(model):
        raise RuntimeError("no compiler")

    trainer, said = small_trainer(deadline=1.0, tokens=1), []
    monkeypatch.setattr(torch, "compile", fail)
    assert trainer.forward_of(said.append) is trainer.model
    assert said == []
    trainer.compile = True
    assert trainer.forward_of(said.append) is trainer.model
    assert said == ["torch.compile failed (RuntimeError: no compiler): training without it."]
    monkeypatch.setattr(torch, "compile", lambda model: model.forward)
    assert trainer.forward_of(said.append) == trainer.model.forward
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_minutes_end_a_run_that_has_tokens_left():
    trainer = small_trainer(deadline=time.monotonic() + 1.5, tokens=10**12)
    kept = []
    trainer.run(lambda: validate(trainer.model, trainer.batches.token_ids, 1), kept.append, print)
    assert time.monotonic() < trainer.plan.deadline + 30
    assert 0 < trainer.tokens_seen < 10**9
    assert kept[0]
    assert trainer.progress(time.monotonic() - 1, step_seconds=1e9) == 1


def test_no_time_to_train_is_refused(corpus, tmp_path):
    result = run(corpus, tmp_path / "out", "--minutes", "0.01")
    assert result.returncode == 1
    assert "--minutes is 0.01" in result.stderr


def test_corpus_that_is_not_there_is_refused_before_any_work(tmp_path):
    (tmp_path / "val.txt").write_text("once")
    result = run(tmp_path, tmp_path / "out")
    assert result.returncode == 2
    assert "holds no train.txt.xz: give the folder that holds both." in result.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "train.txt.xz").write_bytes(b"no xz")
    check_folder(tmp_path)
    with pytest.raises(CorpusError, match="is damaged"):
        read_documents(tmp_path / "train.txt.xz")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--heads", "3"], "cannot be divided into 3 heads"),
        (["--batch-tokens", "100"], "must be a multiple of --positions 64"),
        (["--dropout", "1"], "--dropout is 1.0"),
        (["--resume"], "no run to resume"),
    ],
)
def test_impossible_settings_are_refused(corpus, tmp_path, change, reason):
    result = run(corpus, tmp_path / "out", *change)
    assert result.returncode == 2
    assert reason in result.stderr


def small_trainer(**plan) -> Trainer:
    config = ModelConfig(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    token_ids = torch.randint(50, (500,), generator=torch.Generator().manual_seed(0))
    fixed = {"batch_tokens": 64, "learning_rate": 1e-2, "warmup_steps": 4, "weight_decay": 0.1, "clip": 1.0, "seed": 0}
    torch.manual_seed(0)
    return Trainer(GPT(config), Batches(token_ids, 16, 4, 0), Plan(evaluations=1, **fixed, **plan))


def test_a_pass_shows_every_window_once_and_the_next_one_in_another_order():
    batches = Batches(torch.arange(1000), size=10, num_windows=7, seed=1)
    assert batches.steps_per_pass == 99 // 7
    passes = [
        [batches.of_step(number * batches.steps_per_pass + step) for step in range(batches.steps_per_pass)]
        for number in range(2)
    ]
    for shown in passes:
        windows = torch.cat(shown)
        assert windows.shape == (98, 11)
        assert (windows.diff() == 1).all()
        assert len(set(windows[:, 0].tolist())) == 98
        assert len(set((windows[:, 0] % 10).tolist())) == 1
    assert not torch.equal(passes[0][0], passes[1][0])
    assert torch.equal(Batches(torch.arange(1000), 10, 7, 1).of_step(3), passes[0][3])


def test_learning_rate_rises_then_falls_to_nothing():
    plan = small_trainer(deadline=1.0, tokens=1).plan
    rates = [plan.rate(step, step / 40) for step in range(41)]
    assert rates[:4] == pytest.approx([1e-2 * (s + 1) / 4 * 0.5 * (1 + np.cos(np.pi * s / 40)) for s in range(4)])
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[40] == 0


def test_matrices_decay_and_nothing_else():
    trainer = small_trainer(deadline=1.0, tokens=1)
    decaying, free = trainer.optimizer.param_groups
    assert decaying["weight_decay"] == 0.1
    assert free["weight_decay"] == 0
    assert all(p.dim() == 2 for p in decaying["params"])
    assert all(p.dim() == 1 for p in free["params"])
    assert len(decaying["params"]) + len(free["params"]) == len(list(trainer.model.parameters()))


def test_validation_predicts_each_token_once_from_its_window():
    trainer = small_trainer(deadline=1.0, tokens=1)
    token_ids = trainer.batches.token_ids[:40]  # 39 predictions: windows of 16, 16 and 7
    model = trainer.model.eval()
    nats = sum(
        torch.nn.functional.cross_entropy(model(token_ids[None, a:b])[0], token_ids[a + 1 : b + 1], reduction="sum")
        for a, b in ((0, 16), (16, 32), (32, 39))
    )
    found = validate(model, token_ids, 80)
    assert found.loss == pytest.approx(nats.item() / 39, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(found.loss * 40 / np.log(2) / 80)
