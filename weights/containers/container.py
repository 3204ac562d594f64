"""What every file format offers: tensors by name, with nothing of them read yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tinygpt.weights.tensor import Tensor

# Hugging Face's file of each format, in the order in which transformers looks for them.
FILES = ("model.safetensors", "pytorch_model.bin")


class StoredTensor(Tensor, Protocol):
    """A tensor in a file. How its elements lie there is the format's own affair; `float32` decodes them."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def dtype(self) -> str:
        """The file's dtype: NumPy's name or "bfloat16" for those that can be read, else the format's own."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """How many bytes of the file it takes; 0 where that is not known."""

    @property
    def is_floating(self) -> bool:
        """Whether `float32` can read it. The others are masks, which nobody reads, or a mistake."""


@dataclass(frozen=True)
class Container:
    """What a file holds, or several files that belong together.

    `format` is the format's name in messages; `metadata` is what the file says of itself.
    """

    format: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)
