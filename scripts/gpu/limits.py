"""What the GPU can do at most: its copy bandwidth and its matrix products, through torch."""

import time
from collections.abc import Callable

import torch
import transformers

# GiB copied, and the sides of the square matrices, by device.
SIZES = {"cuda": (2, {"bfloat16": 8192, "float32": 4096}), "cpu": (1 / 16, {"bfloat16": 256, "float32": 512})}


def limits(device: str) -> dict[str, float | str]:
    """bandwidth: bytes read and written a second; of each dtype: operations a second. And what was measured."""
    gib, sides = SIZES[device]
    peaks = {dtype: peak(side, getattr(torch, dtype), device) for dtype, side in sides.items()}
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"gpu": name, **versions, "bandwidth": copy_bandwidth(int(gib * 2**30), device), **peaks}


def copy_bandwidth(num_bytes: int, device: str) -> float:
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_seconds(lambda: target.copy_(source), device)


def peak(side: int, dtype: torch.dtype, device: str) -> float:
    a, b, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    return 2 * side**3 / best_seconds(lambda: torch.matmul(a, b, out=out), device)


def best_seconds(run: Callable[[], object], device: str, repeats: int = 20) -> float:
    """Of the best of three series, which are long enough for the clock."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for series in range(4):
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        if series:  # the first warms up
            best = min(best, (time.perf_counter() - begin) / repeats)
    return best
