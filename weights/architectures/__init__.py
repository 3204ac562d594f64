"""One module for each architecture, and the table by which config.json's `model_type` finds it.

Belongs here: the names that files give to parameters, the shapes these have, and what config.json's fields mean. No
file is opened here. May import the model's config, the errors and weights' tensors.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.architectures import gpt2
from tinygpt.weights.tensor import Tensor


class Architecture(Protocol):
    """What a module of this folder defines. NAME is the architecture's in messages.

    The engine's names for parameters are GPT-2's, such as "h.3.attn.c_attn.weight", and so are the canonical names of
    tensors that are one parameter each. Those that `parameter` joins have canonical names of their own.
    """

    NAME: str

    def model_config(self, fields: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json. One CheckpointError for all problems."""

    def canonical_name(self, name: str) -> str:
        """The name by which the functions below know a tensor, whatever wrappers its model was saved in."""

    def is_ignored(self, canonical_name: str) -> bool:
        """Whether the tensor is known and of no use here."""

    def is_transposed(self, canonical_name: str) -> bool:
        """Whether files hold the matrix as (in, out)."""

    def stored_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that files must hold, by canonical name."""

    def parameter(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """The engine's parameter `name`, made of the tensors in `stored`; every matrix is (out, in)."""


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": gpt2,
}


def architecture_of(fields: Mapping[str, Any]) -> Architecture:
    """The architecture that config.json names; GPT-2's first files name none. CheckpointError for any other."""
    model_type = fields.get("model_type", "gpt2")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json cannot be used: model_type is {model_type!r} and must be "
            f"{' or '.join(map(repr, ARCHITECTURES))}, because no other architecture is implemented. Take another "
            "checkpoint."
        )
    return ARCHITECTURES[model_type]
