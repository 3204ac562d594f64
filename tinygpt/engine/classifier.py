"""Classifier: the head of GPT2ForSequenceClassification or GPT2ForTokenClassification, on the last hidden states."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..kernels import numbers
from ..look import LAST_HIDDEN_STATE
from ..look.captures import Activations
from ..outputs import Classification
from ..weights.checkpoint import Checkpoint
from ..weights.files import read_json_object

SEQUENCE_HEAD = "score.weight"
TOKEN_HEAD = "classifier.weight"
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class Classifier:
    """K labels of a text, or of each of its tokens.

    weight: (K, C); bias: (K,). fields: of config.json: id2label, problem_type, pad_token_id.
    """

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray | None, of_tokens: bool, fields: Mapping[str, Any]
    ):
        self._weight = weight.astype(np.float64)
        self._bias = bias
        self._of_tokens = of_tokens
        self._pad_token_id = fields.get("pad_token_id")
        self._kind = None if of_tokens else fields.get("problem_type")
        if len(weight) == 1 and not of_tokens and self._kind != "regression":
            self._kind = "multi_label_classification"
        names = fields.get("id2label")
        names = names if isinstance(names, dict) else {}
        self._labels = [str(names.get(str(i), f"LABEL_{i}")) for i in range(len(weight))]

    def label(self, activations: Activations) -> Classification:
        """Return the labels of a prompt whose last hidden states were captured.

        As in transformers, a text is classified by its last token that is no padding.
        """
        token_ids = activations.token_ids
        states = activations[LAST_HIDDEN_STATE]  # (T, C)
        if not self._of_tokens:
            last = max(
                (i for i, token_id in enumerate(token_ids) if token_id != self._pad_token_id), default=0
            )
            states = states[last : last + 1]  # (1, C)
        # Not `@`: the bits of NumPy's BLAS depend on its number of threads.
        logits = np.einsum("tc,kc->tk", states, self._weight)
        logits += 0 if self._bias is None else self._bias
        rows = logits.tolist()
        probs = self._probabilities(logits).tolist()
        labels = [self._labels[i] for i in logits.argmax(1)]
        of_all = (rows, probs, labels) if self._of_tokens else (rows[0], probs[0], labels[0])
        return Classification(token_ids, *of_all, num_classes=len(self._labels))

    def _probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return what transformers' pipelines do: of tokens, softmax in any case."""
        if self._kind == "regression":
            return logits
        if self._kind == "multi_label_classification":
            return 0.5 * (1 + np.tanh(0.5 * logits))  # without overflow
        return numbers.softmax(logits)  # (T, K)


def read_heads(checkpoint: Checkpoint) -> tuple[Classifier | None, str]:
    """Return the head that classifies, if there is one, and a sentence on all heads for users of a language model.

    Raise CheckpointError if the head does not fit the model.
    """
    names = ", ".join(sorted({name.partition(".")[0] for name in checkpoint.heads}))
    classifier = _read_classifier(checkpoint)
    use = "nothing here uses it" if classifier is None else "only LLM.classify and /classify use it"
    return classifier, f"{checkpoint.path} has a head ({names}) that no text is made with: {use}."


def _read_classifier(checkpoint: Checkpoint) -> Classifier | None:
    name = next((name for name in (SEQUENCE_HEAD, TOKEN_HEAD) if name in checkpoint.heads), None)
    if name is None or checkpoint.family != "GPT-2":
        return None
    path = checkpoint.path
    width = checkpoint.config.n_embd
    config = checkpoint.folder / "config.json"
    weight = checkpoint.heads[name].float32()
    bias = checkpoint.heads.get(name.replace("weight", "bias"))
    bias = None if bias is None else bias.float32()
    if len(weight.shape) != 2 or weight.shape[1] != width or not weight.shape[0]:
        raise CheckpointError(
            f"{path} holds {name} of shape {weight.shape}, which must be (labels, {width})."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(f"{path} holds a bias of shape {bias.shape} next to {name} {weight.shape}.")
    fields = read_json_object(config) if config.exists() else {}
    if (kind := fields.get("problem_type")) not in (None, *PROBLEM_TYPES):
        allowed = ", ".join(map(repr, PROBLEM_TYPES))
        raise CheckpointError(f"{config} has problem_type {kind!r}, which must be one of {allowed}.")
    return Classifier(weight, bias, name == TOKEN_HEAD, fields)
