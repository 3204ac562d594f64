"""What quantised weights get wrong of the mean input, taken out by the bias.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019).

An input channel that is nearly constant, such as a neuron around 50, adds the same error to all tokens' outputs. Where
a calibration has measured the mean, the bias takes it back, and nothing more has to be computed.
"""

import numpy as np

from tinygpt.kernels.cpu.simd.grouped_tiles import WEIGHT_GROUP
from tinygpt.kernels.cpu.simd.tiles import PANEL
from tinygpt.kernels.host import from_bfloat16


def bias_correction(weight: np.ndarray, factors: np.ndarray, packed: np.ndarray, means: np.ndarray) -> np.ndarray:
    """(N,) to add to a bias: weight (N, K) and factors (K,) as they were packed, `packed` (N, K) by `unpack`."""
    return ((weight * factors - packed) @ (means / factors)).astype(np.float32)


def unpack(dtype: str, arrays: tuple[np.ndarray, ...], n: int, k: int) -> np.ndarray:
    """What one layer's arrays of an int8 or int4 weight stand for, (N, K) float32."""
    panels, scales = arrays
    if dtype == "int8":
        values = _in_order(panels.astype(np.float32) - 128)  # (P, K, PANEL)
        values *= scales.reshape(-1, 1, PANEL)
    else:
        both = np.stack([panels & 15, panels >> 4], axis=2)  # (P, K / 8, 2, PANEL, 4): two steps
        values = _in_order(both.reshape(len(panels), -1, PANEL, 4).astype(np.float32))
        groups = from_bfloat16(scales)  # (P, K / WEIGHT_GROUP, 2, PANEL)
        scale, offset = (np.repeat(groups[:, :, i], WEIGHT_GROUP, axis=1) for i in (0, 1))  # (P, K, PANEL)
        values = values * scale + offset
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])[:n, :k]


def _in_order(panels: np.ndarray) -> np.ndarray:
    """(P, K / 4, PANEL, 4) -> (P, K, PANEL)."""
    return panels.transpose(0, 1, 3, 2).reshape(len(panels), -1, PANEL)
