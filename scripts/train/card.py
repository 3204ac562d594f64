"""What is written about a trained checkpoint: training.json for programs, README.md for people."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tinygpt.weights.config import ModelConfig

RECORD = "training.json"
CARD = """\
# A small GPT-2 that has read {corpus}

| | |
|---|---|
| architecture | GPT-2: {n_layer} layers, {n_embd} wide, {n_head} heads, {n_positions} positions, gelu_new; tied |
| parameters | {parameters:.2f} million, float32 ({megabytes:.1f} MB as bfloat16) |
| tokenizer | byte-level BPE, {vocab_size} tokens, made from the same corpus |
| corpus | {corpus}; {corpus_tokens:.1f} million tokens, documents set apart by the end-of-text token |
| trained on | {tokens_seen:.1f} million tokens, {passes:.1f} passes, dropout {dropout}, seed {seed} |
| optimizer | AdamW, learning rate {learning_rate:g}, {batch_tokens} tokens a step |
| validation loss | {validation_loss:.3f} per token, {bits_per_byte:.3f} bits per byte, at the best of its evaluations |
| measured | on held-out text in windows of {window}, float32 weights |
| trained with | {trained_with} |

## What it writes

Temperature 0.8, top-k 40; the first words are given.

{samples}
"""


@dataclass(frozen=True)
class Training:
    """The facts of a run. `tokens_seen_before` are those of the runs that made the weights it began with (--init), if
    they say so. `bits_per_byte` are of the text's UTF-8; `validation_loss` is in nats per token."""

    corpus: str
    corpus_tokens: int
    tokens_seen: int
    tokens_seen_before: int
    validation_loss: float
    bits_per_byte: float
    window: int
    dropout: float
    seed: int
    learning_rate: float
    batch_tokens: int
    trained_with: str


def write_card(training: Training, config: ModelConfig, num_parameters: int, samples: list[str], folder: Path) -> None:
    (folder / RECORD).write_text(json.dumps(asdict(training), indent=2) + "\n", encoding="utf-8")
    tokens_seen = training.tokens_seen_before + training.tokens_seen
    facts = asdict(training) | {
        "corpus_tokens": training.corpus_tokens / 1e6,
        "tokens_seen": tokens_seen / 1e6,
        "passes": tokens_seen / training.corpus_tokens,
        "parameters": num_parameters / 1e6,
        "megabytes": 2 * num_parameters / 1e6,
        "samples": "\n\n".join(_quote(text) for text in samples),
    }
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")}
    (folder / "README.md").write_text(CARD.format(**facts, **sizes), encoding="utf-8")


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())
