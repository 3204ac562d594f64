"""A run from its arguments, which are train_demo.py's, to a checkpoint with its card."""

import argparse
import signal
import time
from pathlib import Path

import torch

from tinygpt import LLM, SamplingParams
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.files import read_json_object

from .card import RECORD, Training, write_card
from .corpus import CorpusError, Tokens, load_tokens, prepare
from .loop import STATE, Batches, Plan, Trainer
from .model import GPT, num_parameters, write_config, write_weights
from .validation import Validation, estimate_seconds, validate

PROMPTS = ("Once upon a time", "The king", '"Where are you going?"')
SAMPLING = SamplingParams(max_tokens=100, temperature=0.8, top_k=40, seed=0, ignore_eos=True, overflow="slide")
SECONDS_TO_FINISH = 15
# What has to be the same in a run that goes on from another.
SHAPE = ("merges", "layers", "width", "heads", "positions", "batch_tokens", "dropout", "seed")
SEEN_BEFORE = "tokens_seen_before"
FIXED = ("tokens", "batch_tokens", "learning_rate", "warmup_steps", "weight_decay", "clip", "seed", "evaluations")


def run(arguments: argparse.Namespace, start: float) -> None:
    """Train, or go on training, until a bound is reached. `start`, by time.monotonic(), is when --minutes began.

    Raises CorpusError if the corpus is too small, or --resume finds a run with other settings.
    """

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    out, state = arguments.out, arguments.out / "state"
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    state.mkdir(parents=True, exist_ok=True)
    tokens = read_tokens(arguments, state)
    say(f"{len(tokens.train)} tokens to train on, {len(tokens.validation)} to validate on")
    model = new_model(arguments, out, device)
    say(f"{num_parameters(model) / 1e6:.2f} million parameters, {2 * num_parameters(model) / 1e6:.1f} MB as bfloat16")

    held_out = torch.from_numpy(tokens.validation).to(device)
    batches = batches_of(arguments, tokens, device)
    how = {"bfloat16": arguments.bfloat16, "compile": arguments.compile}
    fast = {name: device == "cuda" if wanted is None else wanted for name, wanted in how.items()}
    trainer = Trainer(model, batches, plan_of(arguments, start, estimate_seconds(model, held_out)), **fast)
    about, seen_before = {name: getattr(arguments, name) for name in SHAPE}, tokens_seen_by(arguments.init)
    if arguments.resume:
        seen_before = resume(trainer, state / STATE, about)
        say(f"going on after {trainer.tokens_seen} tokens; the best validation was {trainer.best}")

    def keep(is_best: bool) -> None:
        if is_best:
            write_weights(model, out)
        trainer.save(state, about | {SEEN_BEFORE: seen_before})

    def judge() -> Validation:
        return validate(model, held_out, tokens.validation_bytes)

    if arguments.init is not None:
        trainer.best = judge()
        say(f"{arguments.init} begins with validation {trainer.best}")
        keep(True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: trainer.end())
    trainer.run(judge, keep, say)
    training = training_of(arguments, tokens, trainer, seen_before)
    write_card(training, model.config, num_parameters(model), samples_of(out), out)
    say(f"the best validation was {trainer.best}; {out} holds its weights")


def read_tokens(arguments: argparse.Namespace, state: Path) -> Tokens:
    """The corpus as token ids: prepared now, or as an earlier run has kept them."""
    if arguments.resume:
        return load_tokens(state)
    return prepare(arguments.corpus, arguments.merges, arguments.out, state, arguments.init)


def new_model(arguments: argparse.Namespace, folder: Path, device: str) -> GPT:
    """Of the shape asked for, with the vocabulary that the tokenizer in `folder` has. Writes its config.json there."""
    vocab_size = len(read_json_object(folder / "vocab.json"))
    config = ModelConfig(
        vocab_size=vocab_size,
        n_positions=arguments.positions,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        bos_token_id=vocab_size - 1,
        eos_token_ids=(vocab_size - 1,),
    )
    write_config(config, folder)
    torch.manual_seed(arguments.seed)
    model = GPT(config, arguments.dropout)
    if arguments.init is not None:
        model.begin_with(arguments.init)
    return model.to(device).train()


def batches_of(arguments: argparse.Namespace, tokens: Tokens, device: str) -> Batches:
    num_windows = arguments.batch_tokens // arguments.positions
    batches = Batches(torch.from_numpy(tokens.train).to(device), arguments.positions, num_windows, arguments.seed)
    if batches.windows_per_pass < num_windows:
        raise CorpusError(
            f"the corpus has {batches.windows_per_pass} windows of {arguments.positions} tokens and a step takes "
            f"{num_windows}: lower --batch-tokens or --positions."
        )
    return batches


def plan_of(arguments: argparse.Namespace, start: float, validation_seconds: float) -> Plan:
    """The plan, whose deadline leaves room to validate once more, to write samples, and to leave.

    Raises CorpusError where that leaves no time to train.
    """
    deadline = float("inf")
    if arguments.minutes is not None:
        deadline = start + 60 * arguments.minutes - 1.2 * validation_seconds - SECONDS_TO_FINISH
        if time.monotonic() >= deadline:
            raise CorpusError(
                f"--minutes is {arguments.minutes}, and to start, to validate once ({validation_seconds:.0f} s) and to "
                "finish takes longer: give more."
            )
    return Plan(deadline=deadline, **{name: getattr(arguments, name) for name in FIXED})


def tokens_seen_by(folder: Path | None) -> int:
    """What training has seen that made the checkpoint in `folder`, as far as its record says."""
    if folder is None or not (folder / RECORD).is_file():
        return 0
    record = read_json_object(folder / RECORD)
    return record["tokens_seen"] + record.get(SEEN_BEFORE, 0)


def resume(trainer: Trainer, path: Path, about: dict) -> int:
    """The tokens that were seen before the run began. CorpusError if the state is of a run with other settings."""
    state = torch.load(path, map_location=trainer.batches.token_ids.device, weights_only=True)
    before = state["about"]
    changed = [f"--{name.replace('_', '-')} {before[name]}" for name in about if before[name] != about[name]]
    if changed:
        raise CorpusError(f"the run was started with {', '.join(changed)}: give the same, or another --out.")
    trainer.load(state)
    return before.get(SEEN_BEFORE, 0)


def samples_of(folder: Path) -> list[str]:
    """What the checkpoint makes of each of PROMPTS, by the backend that has nothing to compile."""
    with LLM(str(folder), device="reference", max_num_seqs=len(PROMPTS)) as llm:
        outputs = llm.generate(list(PROMPTS), SAMPLING, use_tqdm=False)
        return [output.prompt + output.outputs[0].text for output in outputs]


def training_of(arguments: argparse.Namespace, tokens: Tokens, trainer: Trainer, seen_before: int) -> Training:
    where = torch.cuda.get_device_name() if trainer.batches.token_ids.is_cuda else "a CPU"
    return Training(
        corpus=arguments.corpus_note,
        corpus_tokens=len(tokens.train),
        tokens_seen=trainer.tokens_seen,
        tokens_seen_before=seen_before,
        validation_loss=trainer.best.loss,
        bits_per_byte=trainer.best.bits_per_byte,
        window=arguments.positions,
        dropout=arguments.dropout,
        seed=arguments.seed,
        learning_rate=arguments.learning_rate,
        batch_tokens=arguments.batch_tokens,
        trained_with=f"torch {torch.__version__} on {where}",
    )
