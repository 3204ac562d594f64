"""How well a model predicts held-out text, in numbers that can be compared between tokenizers."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import GPT

WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class Validation:
    """loss: nats per token. bits_per_byte: of the text's UTF-8, so that a larger vocabulary brings no advantage."""

    loss: float
    bits_per_byte: float

    def __str__(self) -> str:
        return f"{self.loss:.4f} per token, {self.bits_per_byte:.4f} bits per byte"


@torch.inference_mode()
def validate(model: GPT, token_ids: Tensor, num_bytes: int) -> Validation:
    """Over windows of n_positions tokens without overlap, each token predicted from those before it in its window.

    In the precision of the weights, without dropout. token_ids: (T,), on the model's device. The very first token,
    which nothing predicts, counts as the mean of the others.
    """
    was_training = model.training
    model.eval()
    inputs, targets = token_ids[:-1].long(), token_ids[1:].long()
    size = model.config.n_positions
    whole = len(inputs) // size * size
    nats = 0.0
    for part in (slice(0, whole), slice(whole, None)):
        rows = inputs[part].reshape(-1, size if part.start == 0 else max(len(inputs) - whole, 1))
        wanted = targets[part].reshape(rows.shape)
        for first in range(0, len(rows), WINDOWS_AT_ONCE):
            some = slice(first, first + WINDOWS_AT_ONCE)
            nats += model(rows[some], wanted[some], reduction="sum").item()
    model.train(was_training)
    loss = nats / len(inputs)
    return Validation(loss, loss * len(token_ids) / math.log(2) / num_bytes)


def estimate_seconds(model: GPT, token_ids: Tensor) -> float:
    """How long `validate` takes, by its first windows."""
    some = token_ids[: WINDOWS_AT_ONCE * model.config.n_positions + 1]
    seconds = []
    for _ in range(2):  # the first starts the device up
        begin = time.monotonic()
        validate(model, some, 1)
        seconds.append(time.monotonic() - begin)
    return seconds[-1] * len(token_ids) / len(some)
