"""float8 weights: e4m3fn, a byte of sign, 4 bits of exponent and 3 of mantissa, with a scale per channel.

The largest value is 448; there is no infinity, and one NaN per sign (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). A tensor `x` lies beside its scales `x_scale`, float32 of a shape that multiplies it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.weights.containers.mapped_file import MappedTensor
from tinygpt.weights.errors import CheckpointError

FORMAT = "tinygpt float8"  # of a safetensors file, by its metadata
NAME, IN_FILES, SCALE = "float8", "F8_E4M3", "_scale"
LARGEST = 448.0
# By byte: 8 subnormal values, then 8 for each exponent.
_BYTES = np.arange(128)
_EXPONENTS, _MANTISSAS = np.maximum(_BYTES >> 3, 1), (_BYTES & 7) + 8 * (_BYTES >> 3 > 0)
_POSITIVE = np.ldexp(_MANTISSAS / 8, _EXPONENTS - 7)
_POSITIVE[127] = np.nan
VALUES = np.concatenate([_POSITIVE, -_POSITIVE]).astype(np.float32)
_BETWEEN = (_POSITIVE[:126] + _POSITIVE[1:127]) / 2  # neighbors' means: each is a float32


def encode(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of x and float32 scales, one along `axis`: its largest value becomes LARGEST.

    Rounds to the nearest value, ties to the even byte. A channel that is not finite has a scale of NaN.
    """
    largest = np.abs(x).max(axis=axis, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(LARGEST), 1).astype(np.float32)
    scales[~np.isfinite(scales)] = np.nan
    sizes = np.minimum(np.abs(x) / scales, np.float32(LARGEST))
    codes = np.searchsorted(_BETWEEN, sizes)
    is_tie = sizes == _BETWEEN[np.minimum(codes, _BETWEEN.size - 1)]
    codes += is_tie & (codes % 2 == 1)
    codes[np.isnan(sizes)] = 127
    return (codes + 128 * np.signbit(x)).astype(np.uint8), scales


@dataclass(frozen=True, slots=True)
class Float8Tensor:
    """A StoredTensor of float8, and its scales."""

    codes: MappedTensor
    scales: MappedTensor

    @property
    def path(self) -> Path:
        return self.codes.path

    @property
    def dtype(self) -> str:
        return NAME

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_floating(self) -> bool:
        return True

    def float32(self) -> np.ndarray:
        return VALUES[self.codes.array("u1")] * self.scales.float32()

    def release(self) -> None:
        self.scales.release()


def with_scales(path: Path, tensors: Mapping[str, MappedTensor]) -> dict[str, MappedTensor | Float8Tensor]:
    """Return each float8 tensor with its scales. Raise CheckpointError if they are absent or do not fit."""
    scaled = {name for name, tensor in tensors.items() if tensor.dtype == IN_FILES}
    joined: dict[str, MappedTensor | Float8Tensor] = {
        name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALE) not in scaled - {name}
    }
    for name in scaled:
        codes, scales = tensors[name], tensors.get(name + SCALE)
        if scales is None or scales.dtype != "float32" or not _fits(scales.shape, codes.shape):
            raise CheckpointError(f"{path} holds {name} as float8 without its scales: convert the checkpoint again.")
        joined[name] = Float8Tensor(codes, scales)
    return joined


def _fits(scales: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(scales) == len(shape) and all(one in (1, size) for one, size in zip(scales, shape, strict=True))
