"""CPUs without AVX-512: the same bits there, in processes whose Numba compiles for such a CPU.

This file is also what those processes run: test_fallback.py DTYPE OUTPUT. They compile into a cache of their own, one
process for each dtype. What a forward pass takes compiles in half a minute, so every day there are the product alone,
and attention over an int8 cache.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding

from support.kernel_tools import operand_of, packed, random_values, same_bits, solo_team, unwritten
from support.paths import EOS, ROOT
from tinygpt import LLM
from tinygpt.kernels import cpu
from tinygpt.kernels.backend import Batch
from tinygpt.kernels.cpu.arrays import NO_FACTORS
from tinygpt.kernels.cpu.layers import activations
from tinygpt.kernels.cpu.layers.attention import attend, write_kv
from tinygpt.kernels.cpu.layers.linear import REPLACE, Linear, linear, quarters
from tinygpt.kernels.cpu.model import take_steps
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.open import open_checkpoint


@dataclass(frozen=True)
class Target:
    """What Numba compiles for: LLVM's name, all features that are more than this name's, and the dtypes to try."""

    cpu: str
    features: str
    dtypes: tuple[str, ...]  # or INT8_CACHE
    registers: str  # wider ones, which its code must not use


INT8_CACHE = "int8 cache"  # beside int8 weights
TARGETS = {
    "AVX2": Target("x86-64-v3", "+avx2,+fma,+f16c", (*cpu.DTYPES, INT8_CACHE), "zmm"),
    "AVX2 VNNI": Target("x86-64-v3", "+avx2,+fma,+avxvnni", ("int8", "int4", INT8_CACHE), "zmm"),
    "SSE2": Target("x86-64", "+sse2", ("int8", INT8_CACHE), "ymm"),  # no fused multiply-add either: libm's
}
PRODUCT, ATTENTION = "product", "attention"  # in the place of a dtype
CHUNKS = [1] * 10 + [7, 63, 1, 19]  # decode steps, a prefill across a border of key blocks
TOKENS = np.random.default_rng(0).integers(EOS, size=sum(CHUNKS)).tolist()


def is_able() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return bool(binding.get_host_cpu_features().get("avx512f"))


def can_run(name: str) -> bool:
    """AVX-VNNI came to servers' CPUs after AVX-512 VNNI."""
    return name != "AVX2 VNNI" or bool(binding.get_host_cpu_features().get("avxvnni"))


pytestmark = pytest.mark.skipif(
    not is_able(), reason="this CPU has no AVX-512: its kernels are the fallback already"
)


# In the process that is restricted.


def dtypes_of(name: str) -> tuple[str, str]:
    """Of the weights and of the KV cache."""
    return ("int8", "int8") if name == INT8_CACHE else (name, cpu.kv_cache_dtypes(name)[0])


def whole_logits(name: str) -> np.ndarray:
    """(T, V), from a prefill alone."""
    dtype, cache_dtype = dtypes_of(name)
    with LLM("demo", dtype=dtype, kv_cache_dtype=cache_dtype, threads=1, max_num_seqs=1) as llm:
        return llm.logits(TOKENS)


def logits_in_pieces(name: str) -> np.ndarray:
    """(T, V), in chunks, on two threads, behind another sequence."""
    checkpoint = open_checkpoint("demo")
    count = 2 * len(TOKENS)
    (dtype, cache_dtype) = dtypes_of(name)
    params = cpu.load_params(checkpoint, dtype, 2)
    cache = cpu.new_kv_cache(checkpoint.config, 2, len(TOKENS), cache_dtype)
    workspace = cpu.new_workspace(checkpoint.config, count, count, 2, dtype)
    pieces, start = [], 0
    for size in CHUNKS:
        chunk = TOKENS[start : start + size]
        batch = Batch.of([chunk[::-1], chunk], [start, start], [1, 0], "all")
        pieces.append(cpu.forward(params, batch, cache, workspace)[size:].copy())
        start += size
    return np.concatenate(pieces)


def products() -> np.ndarray:
    """Of rows of many sizes, in four segments."""
    weight = Linear(packed(random_values(83, 130)), random_values(1, 83, seed=1), NO_FACTORS)
    found = []
    for rows in (1, 2, 5, 13, 50):
        out = unwritten(rows, 83)
        x = operand_of(random_values(rows, 130, seed=2))
        linear(solo_team(), out, x, weight, np.int64(0), quarters(130, 1), activations.NONE, REPLACE)
        found.append(out)
    return np.concatenate(found)


def attended() -> np.ndarray:
    """Over an int8 cache: heads of two sizes, queries one by one and by sixes."""
    found = []
    positions = np.arange(70, dtype=np.int32)
    slots = np.zeros(70, np.int32)
    for size in (22, 80):
        config = ModelConfig(n_layer=1, n_head=2, n_embd=2 * size, n_positions=70, vocab_size=5)
        qkv = random_values(70, 6 * size)
        (k, v) = (array[0] for array in cpu.new_kv_cache(config, 1, 70, "int8"))
        for tile in (1, 6):
            out = unwritten(70, 2 * size)
            tiles = np.array([*range(0, 70, tile), 70], np.int32)
            write_kv(solo_team(), k, v, qkv, positions, slots, tiles)
            attend(solo_team(size), out, qkv, k, v, positions, slots, tiles, np.float32(size**-0.5), None)
            found.append(out.ravel())
    return np.concatenate(found)


def probe(dtype: str, output: Path) -> None:
    if dtype in PARTS:
        compute, kernel = PARTS[dtype]
        whole = pieces = compute()
        assembly = "".join(kernel.inspect_asm().values())
    else:
        whole = whole_logits(dtype)
        pieces = logits_in_pieces(dtype)
        assembly = "".join(take_steps.compiled.inspect_asm().values())
    wide = [register for register in ("ymm", "zmm") if register in assembly]
    np.savez(output, whole=whole, pieces=pieces, wide=np.array(wide, str), size=len(assembly))


PARTS = {PRODUCT: (products, linear.in_numba), ATTENTION: (attended, attend.compiled)}


# In the tests.


def computed_on(name: str, dtype: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    target = TARGETS[name]
    file = folder / f"{name}-{dtype}.npz"
    cpu_choice = {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.features}
    environment = {**os.environ, **cpu_choice, "NUMBA_CACHE_DIR": str(folder / "cache")}
    environment["TINYGPT_KERNELS"] = "compile"
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [sys.executable, __file__, dtype, str(file)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    with np.load(file) as output:
        whole, pieces, wide, size = (output[key] for key in ("whole", "pieces", "wide", "size"))
    assert size > 0
    assert target.registers not in wide, "the restriction had no effect"
    return whole, pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in TARGETS for dtype in TARGETS[name].dtypes]
)
def test_a_cpu_without_avx512(name, dtype, tmp_path):
    if not can_run(name):
        pytest.skip("this CPU has no AVX-VNNI")
    whole, pieces = computed_on(name, dtype, tmp_path)
    same_bits(pieces, whole)
    # In bfloat16 too: AVX-512's product of pairs takes numbers below 1e-38 for 0, and the demo's steps meet none.
    if dtype != "bfloat16" or not TARGET.has_amx:  # which sums in an order of its own: test_amx.py
        same_bits(whole, whole_logits(dtype))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_step_on_a_cpu_without_avx512(part, tmp_path):
    found, _ = computed_on("AVX2", part, tmp_path)
    compute, _ = PARTS[part]
    same_bits(found, compute())


if __name__ == "__main__":
    probe(sys.argv[1], Path(sys.argv[2]))
