"""Embed a trained checkpoint as the demo: python scripts/embed_demo.py FOLDER [OUTPUT]

FOLDER holds config.json, vocab.json, merges.txt and float32 weights. OUTPUT, by default weights/demo/, receives
the same with the weights rounded to bfloat16, and a model card. What the card says of the training is what
train_demo.py wrote into FOLDER/training.json, or of the first demo where there is no such file.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np

from tinygpt.weights.architectures.gpt2 import model_config
from tinygpt.weights.containers import read_weights
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
| trained on | {tokens_seen:.1f} million tokens of {corpus}, documents set apart by `<|endoftext|>` |
| validation loss | {loss} per token, {bits} bits per byte (held-out text in windows of {window}, float32 weights) |
| licence | MIT, as the project |

It has read very little: sentences hold together and stories do not. Use it to try the engine out, not for facts.
"""
# What training.json says, of the first demo, which was trained before there was such a file.
FIRST_TRAINING = {
    "corpus": "English classics in the public domain",
    "tokens_seen": 9_700_000,
    "validation_loss": 3.973,
    "bits_per_byte": 1.46,
    "window": 512,
}


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The bits of finite float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    half_way = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half_way) >> np.uint32(16)).astype("<u2")


def write_bfloat16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 arrays as bfloat16 safetensors, by hand because NumPy cannot name bfloat16 to the library."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        start, end = end, end + 2 * array.size
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(to_bfloat16(array).tobytes())


def embed(source: Path, output: Path) -> None:
    values = read_json_object(source / "config.json") | {"dtype": "bfloat16"}
    config = model_config(values)
    tensors = {name: tensor.float32() for name, tensor in read_weights(source).tensors.items()}
    output.mkdir(parents=True, exist_ok=True)
    write_bfloat16(output / "model.safetensors", tensors)
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(source / name, output / name)
    recorded = source / "training.json"
    training = read_json_object(recorded) if recorded.exists() else FIRST_TRAINING
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
