"""Embed a trained checkpoint as the demo: python scripts/embed_demo.py FOLDER [OUTPUT]

FOLDER is what train_demo.py has written: config.json, vocab.json, merges.txt, float32 weights, and training.json, which
the model card quotes. OUTPUT, by default weights/demo/, receives the same with the weights rounded to bfloat16, and the
card. Needs torch.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tinygpt.weights.containers import read_weights
from tinygpt.weights.families.hugging_face import model_config
from tinygpt.weights.json_file import read_json_object

DEMO = Path(__file__).resolve().parents[1] / "weights" / "demo"
CARD = """\
# The demo checkpoint

A small GPT-2 that writes in the manner of old tales, embedded so that a first run needs no download.

| | |
|---|---|
| architecture | GPT-2: {n_layer} layers, {n_embd} wide, {n_head} heads, {n_positions} positions, {activation}; tied |
| parameters | {parameters:.1f} million, stored as bfloat16 |
| tokenizer | byte-level BPE, {vocab_size} tokens |
| trained on | {tokens_seen:.1f} million tokens of {corpus}, documents set apart by the end-of-text token |
| validation loss | {loss} per token, {bits} bits per byte (held-out text in windows of {window}, float32 weights) |
| licence | MIT, as the project |

It has read very little: sentences hold together and stories do not. Use it to try the engine out, not for facts.
"""


def embed(source: Path, output: Path) -> None:
    values = read_json_object(source / "config.json") | {"dtype": "bfloat16"}
    config = model_config(values)
    tensors = {name: tensor.float32() for name, tensor in read_weights(source).tensors.items()}
    output.mkdir(parents=True, exist_ok=True)
    rounded = {name: torch.from_numpy(np.array(array)).to(torch.bfloat16) for name, array in tensors.items()}
    save_file(rounded, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(source / name, output / name)
    training = read_json_object(source / "training.json")
    card = CARD.format(
        corpus=training["corpus"],
        tokens_seen=training["tokens_seen"] / 1e6,
        loss=f"{training['validation_loss']:.3f}",
        bits=f"{training['bits_per_byte']:.2f}",
        window=training["window"],
        n_layer=config.n_layer,
        n_embd=config.n_embd,
        n_head=config.n_head,
        n_positions=config.n_positions,
        vocab_size=config.vocab_size,
        activation=config.activation_function,
        parameters=sum(array.size for array in tensors.values()) / 1e6,
    )
    (output / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path, nargs="?", default=DEMO)
    arguments = parser.parse_args()
    embed(arguments.folder, arguments.output)
