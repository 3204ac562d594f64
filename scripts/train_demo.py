"""Train the demo checkpoint: a small GPT-2 and its tokenizer, from a folder of texts, on a GPU if there is one.

    python scripts/train_demo.py --corpus FOLDER --corpus-note "a part of TinyStories" --out trained

trains on 500 million tokens; --minutes 9 ends it earlier, and --resume continues a run.

The corpus is train.txt.xz and val.txt, documents separated by <|endoftext|>. OUT becomes a checkpoint in Hugging Face's
layout with training.json, the record of the run; it always holds the weights that were best on val.txt. OUT/state is
for --resume. Ctrl-C and SIGTERM end a run as --minutes does. embed_demo.py makes the checkpoint the demo. Needs torch,
transformers and tokenizers.
"""

import argparse
import json
import lzma
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

# tinygpt is next to scripts/, installed or not.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from tinygpt.tokenizer.tokenizer import Tokenizer

START = time.monotonic()
# 7 layers and 7935 merges, a vocabulary of 8192, fit into 32 MB of bfloat16.
SIZES = {"merges": 7935, "layers": 7, "width": 384, "heads": 6, "positions": 1024}
END_OF_TEXT = "<|endoftext|>"
TRAIN, VALIDATION, STATE, RECORD = "train.txt.xz", "val.txt", "state.pt", "training.json"
SECONDS_TO_FINISH = 15
CLIP = 1.0  # largest norm of all gradients together
VALIDATION_WINDOWS = 16  # of a forward pass
STEPS_BETWEEN_WAITS = 10  # the host may run ahead of a GPU by so many steps
# Settings that a resumed run shares with its beginning.
FIXED = (*SIZES, "batch_tokens", "dropout", "seed")


def read_documents(path: Path) -> list[str]:
    """Return the documents of a text file, compressed or not. Exit if it is damaged or empty."""
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read ({error}).") from error
    documents = [document for document in text.split(END_OF_TEXT) if document.strip()]
    if not documents:
        raise SystemExit(f"{path} holds no text.")
    return documents


def train_tokenizer(documents: Iterable[str], num_merges: int, folder: Path) -> None:
    """Write vocab.json and merges.txt of a byte-level BPE: 256 bytes, the merges in order, then the end of text."""
    from tokenizers import Tokenizer as Trainable
    from tokenizers import models, pre_tokenizers, trainers

    trainable = Trainable(models.BPE())
    trainable.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False)
    trainable.train_from_iterator(documents, trainer)
    trainable.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary[END_OF_TEXT] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")


def prepare_tokens(args: argparse.Namespace, state: Path) -> dict[str, np.ndarray]:
    """Return token ids "train" and "validation", documents joined by the end of text, and keep them in `state`."""
    path = state / "tokens.npz"
    if not args.resume:
        files = {"train": TRAIN, "validation": VALIDATION}
        documents = {kind: read_documents(args.corpus / name) for kind, name in files.items()}
        train_tokenizer(documents["train"], args.merges, args.out)
        tokenizer, end = Tokenizer.from_folder(args.out), vocabulary_size(args.out) - 1
        ids = {kind: [i for text in texts for i in (*tokenizer.encode(text), end)] for kind, texts in documents.items()}
        np.savez(path, **{kind: np.array(found[:-1], np.int32) for kind, found in ids.items()})
    with np.load(path) as kept:
        return dict(kept)


def vocabulary_size(folder: Path) -> int:
    return len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))


class GPT(nn.Module):
    """transformers' GPT-2. Returns logits of token ids (B, T), or with targets (B, T) their cross-entropy in nats."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, token_ids: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        logits = self.gpt2(token_ids).logits  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    def write_weights(self, folder: Path) -> None:
        """Write a float32 model.safetensors, and replace an older one when the new one is whole."""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.gpt2.state_dict().items()}
        del tensors["lm_head.weight"]  # tied to the token embedding
        partial = folder / "model.safetensors.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(folder / "model.safetensors")


def new_model(args: argparse.Namespace) -> GPT:
    """Return a model for the tokenizer in OUT, and write its config.json there."""
    vocab_size = vocabulary_size(args.out)
    sizes = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.heads, "n_positions": args.positions}
    end = {"bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}
    config = GPT2Config(vocab_size=vocab_size, **sizes, **end, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    values = config.to_diff_dict() | {"architectures": ["GPT2LMHeadModel"], "dtype": "float32", **sizes}
    values |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    (args.out / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    torch.manual_seed(args.seed)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = args.dropout
    config.use_cache = False
    return GPT(config)


@dataclass(frozen=True)
class Batches:
    """Windows of `size` tokens and the following one, out of token_ids (T,), in a new order in each pass.

    A pass starts at a random place in the first window. A step's batch depends on the seed and the step alone.
    """

    token_ids: Tensor
    size: int
    num_windows: int
    seed: int

    @property
    def windows_per_pass(self) -> int:
        return len(self.token_ids) // self.size - 1  # room to start anywhere in the first

    @property
    def steps_per_pass(self) -> int:
        return self.windows_per_pass // self.num_windows

    def of_step(self, step: int) -> Tensor:
        """Return (num_windows, size + 1)."""
        starts = pass_starts(self.windows_per_pass, self.size, self.seed, step // self.steps_per_pass)
        first = step % self.steps_per_pass * self.num_windows
        rows = starts[first : first + self.num_windows, None] + torch.arange(self.size + 1)
        return self.token_ids[rows.to(self.token_ids.device)].long()


@lru_cache(maxsize=2)
def pass_starts(num_windows: int, size: int, seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randint(size, (), generator=generator) + size * torch.randperm(num_windows, generator=generator)


@torch.inference_mode()
def validate(model: GPT, token_ids: Tensor, size: int) -> float:
    """Return nats a token over windows of `size` without overlap. token_ids: (T,); all but the first are predicted."""
    was_training, nats = model.training, 0.0
    model.eval()
    inputs, targets = token_ids[:-1].long(), token_ids[1:].long()
    whole = len(inputs) // size * size
    for part in (slice(0, whole), slice(whole, None)):
        rows = inputs[part].reshape(-1, size if part.start == 0 else max(len(inputs) - whole, 1))
        wanted = targets[part].reshape(rows.shape)
        for first in range(0, len(rows), VALIDATION_WINDOWS):
            some = slice(first, first + VALIDATION_WINDOWS)
            nats += model(rows[some], wanted[some], reduction="sum").item()
    model.train(was_training)
    return nats / len(inputs)


@dataclass
class Trainer:
    """A model in training. tokens, deadline (time.monotonic()): the first bound that is reached ends the run."""

    model: GPT
    batches: Batches
    tokens: int
    deadline: float = math.inf
    learning_rate: float = 1.5e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    bfloat16: bool = False  # products; weights and sums stay float32
    step: int = 0
    best: float = math.inf
    is_ending: bool = False

    @property
    def tokens_seen(self) -> int:
        return self.step * self.batches.num_windows * self.batches.size

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW with weight decay on matrices and embeddings, not on biases and layer norms."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)

    def rate(self, progress: float) -> float:
        """Return the learning rate: linear warm-up, then a cosine of the progress down to 0."""
        warm = min(1.0, (self.step + 1) / self.warmup_steps)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def progress(self, begin: float, step_seconds: float = 0.0) -> float:
        """Return the share of the nearer bound; 1 if another step would not fit in."""
        now = time.monotonic()
        is_late = self.is_ending or now + step_seconds >= self.deadline
        of_time = 1.0 if is_late else (now - begin) / (self.deadline - begin)
        return max(self.tokens_seen / self.tokens, of_time)

    def loss_of(self, forward: Callable[..., Tensor], batch: Tensor) -> Tensor:  # (B, T + 1) -> ()
        with torch.autocast(batch.device.type, torch.bfloat16) if self.bfloat16 else nullcontext():
            return forward(batch[:, :-1], batch[:, 1:])

    def train_step(self, forward: Callable[..., Tensor], progress: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(progress)
        loss = self.loss_of(forward, self.batches.of_step(self.step))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def run(self, forward: Callable[..., Tensor], evaluate: Callable[[float, float], None], evaluations: int) -> None:
        """Train until a bound is reached, at least one step, and call evaluate(progress, loss) at even distances."""
        begin = time.monotonic()
        progress = self.progress(begin)
        due = progress + 1 / evaluations
        while True:
            before = time.monotonic()
            loss = self.train_step(forward, progress)
            if self.step % STEPS_BETWEEN_WAITS == 0:
                loss.item()
            progress = self.progress(begin, time.monotonic() - before)
            if progress >= due or progress >= 1:
                evaluate(progress, loss.item())
                due = progress + 1 / evaluations
            if progress >= 1:
                return

    def state(self) -> dict:
        optimizer, model = self.optimizer.state_dict(), self.model.state_dict()
        return {"model": model, "optimizer": optimizer, "step": self.step, "best": self.best}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best = state["step"], state["best"]


def run(args: argparse.Namespace) -> None:
    def say(text: str) -> None:
        print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)

    state = args.out / "state"
    state.mkdir(parents=True, exist_ok=True)
    tokens = {kind: torch.from_numpy(ids).to(args.device) for kind, ids in prepare_tokens(args, state).items()}
    model = new_model(args).to(args.device).train()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{len(tokens['train'])} tokens to train on; {num_parameters / 1e6:.2f} million parameters")
    batches = Batches(tokens["train"], args.positions, args.batch_tokens // args.positions, args.seed)
    if batches.steps_per_pass < 1:
        raise SystemExit("the corpus has less tokens than a step takes: lower --batch-tokens or --positions.")
    about = {name: getattr(args, name) for name in FIXED}
    how = {name: getattr(args, name) for name in ("learning_rate", "warmup_steps", "weight_decay", "bfloat16")}
    trainer = Trainer(model, batches, args.tokens, **how)
    if args.resume:
        kept = torch.load(state / STATE, map_location=args.device, weights_only=True)
        if changed := [f"--{name.replace('_', '-')} {kept[name]}" for name in FIXED if kept[name] != about[name]]:
            raise SystemExit(f"the run was started with {', '.join(changed)}: give the same, or another --out.")
        trainer.load(kept)
        say(f"continuing after {trainer.tokens_seen} tokens; the best validation was {trainer.best:.4f}")

    def evaluate(progress: float, loss: float) -> None:
        found = validate(model, tokens["validation"], args.positions)
        say(f"{progress:4.0%} {trainer.tokens_seen / 1e6:8.2f} M tokens, loss {loss:.4f}, validation {found:.4f}")
        if found < trainer.best:
            trainer.best = found
            model.write_weights(args.out)
        partial = state / f"{STATE}.partial"
        torch.save(trainer.state() | about, partial)
        partial.replace(state / STATE)

    begin = time.monotonic()
    evaluate(0.0, math.nan)
    if args.minutes is not None:
        trainer.deadline = START + 60 * args.minutes - 1.2 * (time.monotonic() - begin) - SECONDS_TO_FINISH
        if time.monotonic() >= trainer.deadline:
            raise SystemExit(f"--minutes is {args.minutes}: starting and validating takes longer.")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(trainer, "is_ending", True))
    if trainer.tokens_seen < args.tokens:
        trainer.run(torch.compile(model) if args.compile else model, evaluate, args.evaluations)
    num_bytes = (args.corpus / VALIDATION).stat().st_size
    device = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    record = {
        "corpus": args.corpus_note,
        "corpus_tokens": len(tokens["train"]),
        "tokens_seen": trainer.tokens_seen,
        "validation_loss": trainer.best,  # nats a token
        "bits_per_byte": trainer.best * len(tokens["validation"]) / math.log(2) / num_bytes,
        "window": args.positions,
        **{name: getattr(args, name) for name in ("dropout", "seed", "learning_rate", "batch_tokens")},
        "trained_with": f"torch {torch.__version__} on {device}",
    }
    (args.out / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    say(f"the best validation was {trainer.best:.4f}; {args.out} holds its weights")
    print(f"To embed it as the demo: python scripts/embed_demo.py {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="DIR", help="train.txt.xz and val.txt")
    add("--corpus-note", required=True, metavar="TEXT", help="a description for the record")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--resume", action="store_true", help="continue the run in OUT")
    add("--tokens", type=int, default=500_000_000, help="to see, all runs together (default: 500 million)")
    add("--minutes", type=float, help="bound of this run, everything included")
    add("--batch-tokens", type=int, default=65_536, help="of a step")
    numbers = {"dropout": 0.1, "learning-rate": 1.5e-3, "warmup-steps": 200, "weight-decay": 0.1, "evaluations": 20}
    for name, default in {**SIZES, **numbers, "seed": 0}.items():
        add(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    has_gpu = torch.cuda.is_available()
    add("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    add("--bfloat16", action=argparse.BooleanOptionalAction, default=has_gpu, help="multiply in bfloat16")
    add("--compile", action=argparse.BooleanOptionalAction, default=has_gpu, help="compile the model, for a minute")
    args = parser.parse_args()
    has_run = (args.out / "state" / STATE).exists()
    if has_run != args.resume:
        parser.error(f"{args.out} holds {'a' if has_run else 'no'} run: {'add' if has_run else 'omit'} --resume.")
    if missing := [name for name in (TRAIN, VALIDATION) if not (args.corpus / name).is_file()]:
        parser.error(f"--corpus {args.corpus} holds no {' and no '.join(missing)}.")
    if args.width % args.heads or args.batch_tokens % args.positions:
        parser.error("--width must be a multiple of --heads, and --batch-tokens of --positions.")
    return args


if __name__ == "__main__":
    run(parse_arguments())
