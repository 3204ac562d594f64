"""Train the demo checkpoint: a small GPT-2 and its tokenizer, from a folder of texts, on a GPU if there is one.

    python scripts/train_demo.py --corpus FOLDER --corpus-note "a part of TinyStories" --out trained
    python scripts/train_demo.py --out trained --embed       # makes it the demo, in weights/demo/

The first trains on 500 million tokens. Ctrl-C ends a run earlier; --resume continues it, with the same settings.

The corpus is train.txt.xz and val.txt, documents separated by <|endoftext|>. OUT becomes a checkpoint in Hugging Face's
layout, with the weights that were best on val.txt and training.json, the record of the run. OUT/state is for --resume.
Needs torch, transformers, accelerate and tokenizers (extra `parity`).
"""

import argparse
import json
import lzma
import math
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tinygpt.text.tokenizer import Tokenizer
from tinygpt.weights.containers.formats import read_weights
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.files import read_json_object

# 7 layers and 7935 merges, a vocabulary of 8192, fit into 32 MB of bfloat16.
SIZES = {"merges": 7935, "layers": 7, "width": 384, "heads": 6, "positions": 1024}
END_OF_TEXT = "<|endoftext|>"
TRAIN = "train.txt.xz"
VALIDATION = "val.txt"
RECORD = "training.json"
DEMO = Path(__file__).resolve().parents[1] / "weights" / "demo"
CORPUS = "TinyStories"
CARD = """\
# The demo checkpoint

A small GPT-2 that writes little stories in simple words, embedded so that a first run needs no download.

| | |
|---|---|
| architecture | GPT-2: {n_layer} layers, {n_embd} wide, {n_head} heads, {n_positions} positions, \
{activation_function}; tied |
| parameters | {parameters:.1f} million, stored as bfloat16: {megabytes:.1f} MB |
| tokenizer | byte-level BPE, {vocab_size} tokens, made from the same stories |
| corpus | a part of TinyStories, {corpus_tokens:.1f} million tokens; stories are set apart by the end-of-text token |
| trained on | {tokens_seen:.1f} million tokens of it, {passes:.1f} passes, by AdamW: {batch_tokens} tokens a step, \
learning rate {learning_rate:g}, dropout {dropout:g} |
| trained with | {trained_with} |
| validation loss | {validation_loss:.3f} per token, {bits_per_byte:.3f} bits per byte |
| measured | on held-out stories in windows of {window}, float32 weights |
| licence | MIT, as the project |

[TinyStories](https://arxiv.org/abs/2305.07759), by Ronen Eldan and Yuanzhi Li (2023), are stories in words that small
children know, written by GPT-3.5 and GPT-4. Their licence, CDLA-Sharing-1.0, is about passing the stories on, which
nothing here does, and puts no restriction on what is trained on them.

The demo knows such stories and nothing else: they begin, go on and end, but people in them may change their names. Use
it to try the engine out, not for facts.
"""


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
    """Write a byte-level BPE: 256 bytes, the merges in order, then the end of text."""
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


@dataclass(frozen=True)
class Windows(Dataset):
    """`count` windows of `size` token ids, and the next ids, of token_ids (T,).

    is_shifted: whether a window starts anywhere in its piece of the text, anew each time.
    """

    token_ids: Tensor
    size: int
    count: int
    is_shifted: bool = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = i * self.size + (int(torch.randint(self.size, ())) if self.is_shifted else 0)
        window = self.token_ids[start : start + self.size + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the nats a token; the labels (B, T) are shifted already."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def new_model(args: argparse.Namespace, vocab_size: int) -> GPT2LMHeadModel:
    sizes = {
        "n_layer": args.layers,
        "n_embd": args.width,
        "n_head": args.heads,
        "n_positions": args.positions,
    }
    end = {"bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), args.dropout)
    torch.manual_seed(args.seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes, **end, **dropout, use_cache=False))


def new_trainer(
    args: argparse.Namespace, model: GPT2LMHeadModel, train: Tensor, validation: Tensor
) -> Trainer:
    """Return a trainer that evaluates at even distances, and keeps the best and the last state."""
    steps = max(args.tokens // args.batch_tokens // args.evaluations, 1)
    windows = args.batch_tokens // args.positions
    whole, held_out = ((len(ids) - 1) // args.positions for ids in (train, validation))
    count = (whole - 1) // windows * windows  # room to shift, and equal batches
    if count <= 0 or held_out == 0:
        raise SystemExit("the corpus has less tokens than a step takes: lower --batch-tokens or --positions.")
    how = TrainingArguments(
        str(args.out / "state"),
        max_steps=steps * args.evaluations,
        per_device_train_batch_size=windows,
        per_device_eval_batch_size=windows,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        adam_beta2=0.95,
        bf16=args.bfloat16,
        torch_compile=args.compile,
        use_cpu=args.device == "cpu",
        seed=args.seed,
        prediction_loss_only=True,
        logging_steps=steps,
        eval_strategy="steps",
        eval_steps=steps,
        save_steps=steps,
        save_total_limit=2,
        metric_for_best_model="eval_loss",
        report_to="none",
    )
    datasets = {"train_dataset": Windows(train, args.positions, count, is_shifted=True)}
    datasets["eval_dataset"] = Windows(validation, args.positions, held_out)
    return Trainer(model, how, **datasets, compute_loss_func=mean_loss)


def run(args: argparse.Namespace) -> None:
    state = args.out / "state"
    state.mkdir(parents=True, exist_ok=True)
    train, validation = (read_documents(args.corpus / name) for name in (TRAIN, VALIDATION))
    if not args.resume:
        train_tokenizer(train, args.merges, args.out)
    tokenizer = Tokenizer.from_folder(args.out)
    end = json.loads((args.out / "vocab.json").read_text(encoding="utf-8"))[END_OF_TEXT]
    token_ids = [
        torch.tensor([i for document in documents for i in (*tokenizer.encode(document), end)][:-1])
        for documents in (train, validation)
    ]
    trainer = new_trainer(args, model := new_model(args, end + 1), *token_ids)
    with suppress(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=args.resume)
    if trainer.state.best_model_checkpoint is None:
        raise SystemExit("the run ended before its first evaluation.")
    GPT2LMHeadModel.from_pretrained(state / Path(trainer.state.best_model_checkpoint).name).save_pretrained(
        args.out
    )
    best = trainer.state.best_metric
    (num_tokens, num_held_out) = map(len, token_ids)
    num_bytes = (args.corpus / VALIDATION).stat().st_size
    device = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    record = {
        "corpus": args.corpus_note,
        "corpus_tokens": num_tokens,
        "tokens_seen": trainer.state.global_step * trainer.args.train_batch_size * args.positions,
        "validation_loss": best,  # nats a token
        "bits_per_byte": best * num_held_out / math.log(2) / num_bytes,
        "window": args.positions,
        **{name: getattr(args, name) for name in ("dropout", "seed", "learning_rate", "batch_tokens")},
        "trained_with": f"torch {torch.__version__} on {device}",
    }
    (args.out / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(
        f"{model.num_parameters() / 1e6:.2f} million parameters; the best validation was {best:.4f} nats a token"
    )
    print(f"To embed it as the demo: python scripts/train_demo.py --out {args.out} --embed")


def embed(source: Path, output: Path) -> None:
    """Write a trained checkpoint as the demo: its weights rounded to bfloat16, and a card that quotes its record."""
    training = read_json_object(source / RECORD)
    if CORPUS not in training["corpus"]:
        raise SystemExit(
            f"the corpus of {source} is {training['corpus']!r} and the demo's card is for {CORPUS}."
        )
    values = read_json_object(source / "config.json") | {"dtype": "bfloat16"}
    tensors = {name: tensor.float32() for name, tensor in read_weights(source).tensors.items()}
    rounded = {name: torch.from_numpy(np.array(array)).to(torch.bfloat16) for name, array in tensors.items()}
    card = card_of(training, values, sum(array.size for array in tensors.values()))
    output.mkdir(parents=True, exist_ok=True)
    (output / "model.safetensors").write_bytes(save(rounded, metadata={"format": "pt"}))
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name in ("vocab.json", "merges.txt", RECORD):
        shutil.copyfile(source / name, output / name)
    (output / "README.md").write_text(card, encoding="utf-8")


def card_of(training: dict, values: dict, num_parameters: int) -> str:
    # Records of older runs have tokens_seen_before.
    tokens_seen = training["tokens_seen"] + training.get("tokens_seen_before", 0)
    derived = {"parameters": num_parameters / 1e6, "megabytes": 2 * num_parameters / 1e6}
    derived |= {"corpus_tokens": training["corpus_tokens"] / 1e6, "tokens_seen": tokens_seen / 1e6}
    derived |= {"passes": tokens_seen / training["corpus_tokens"]}
    return CARD.format(**{**vars(model_config(values)), **training, **derived})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, metavar="DIR", help="train.txt.xz and val.txt")
    add("--corpus-note", metavar="TEXT", help="a description for the record")
    add("--out", type=Path, required=True, metavar="DIR")
    add(
        "--embed",
        type=Path,
        nargs="?",
        const=DEMO,
        metavar="DIR",
        help="train nothing, and make the checkpoint in OUT the demo in DIR (default: weights/demo/)",
    )
    add("--resume", action="store_true", help="continue the run in OUT")
    add("--tokens", type=int, default=500_000_000, help="to see, all runs together (default: 500 million)")
    add("--batch-tokens", type=int, default=65_536, help="of a step")
    numbers = {
        "dropout": 0.1,
        "learning-rate": 1.5e-3,
        "warmup-steps": 200,
        "weight-decay": 0.1,
        "evaluations": 20,
    }
    for name, default in {**SIZES, **numbers, "seed": 0}.items():
        add(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    has_gpu = torch.cuda.is_available()
    add("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    add("--bfloat16", action=argparse.BooleanOptionalAction, default=has_gpu, help="multiply in bfloat16")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=has_gpu,
        help="compile the model, for a minute",
    )
    args = parser.parse_args()
    if args.embed is not None:
        return args
    if args.corpus is None or args.corpus_note is None:
        parser.error("--corpus and --corpus-note are needed to train.")
    has_run = any((args.out / "state").glob("checkpoint-*"))
    if has_run != args.resume:
        parser.error(
            f"{args.out} holds {'a' if has_run else 'no'} run: {'add' if has_run else 'omit'} --resume."
        )
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.embed is not None:
        embed(arguments.out, arguments.embed)
    else:
        run(arguments)
