"""Embed a trained checkpoint as the demo: python scripts/embed_demo.py FOLDER [OUTPUT]

FOLDER is an output of train_demo.py, trained on TinyStories. OUTPUT, by default weights/demo/, receives its files with
weights rounded to bfloat16, and a card that quotes its training.json. Needs torch.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from tinygpt.weights.containers.formats import read_weights
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.files import read_json_object

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


def embed(source: Path, output: Path) -> None:
    training = read_json_object(source / "training.json")
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
    for name in ("vocab.json", "merges.txt", "training.json"):
        shutil.copyfile(source / name, output / name)
    (output / "README.md").write_text(card, encoding="utf-8")


def card_of(training: dict, values: dict, num_parameters: int) -> str:
    tokens_seen = training["tokens_seen"] + training.get(
        "tokens_seen_before", 0
    )  # in the records of older runs
    derived = {"parameters": num_parameters / 1e6, "megabytes": 2 * num_parameters / 1e6}
    derived |= {"corpus_tokens": training["corpus_tokens"] / 1e6, "tokens_seen": tokens_seen / 1e6}
    derived |= {"passes": tokens_seen / training["corpus_tokens"]}
    return CARD.format(**{**vars(model_config(values)), **training, **derived})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path, nargs="?", default=DEMO)
    arguments = parser.parse_args()
    embed(arguments.folder, arguments.output)
