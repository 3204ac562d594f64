"""CPUs with fewer instructions: the same bits there, in processes whose kernels are for such a CPU.

This file is also what those processes run: test_fallback.py DTYPE OUTPUT. Every day they run the package's objects;
with --slow they compile, each for half a minute, into a cache of their own.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.examples import daily
from support.kernel_tools import same_bits
from support.paths import EOS, ROOT
from tinygpt import LLM
from tinygpt.kernels import cpu
from tinygpt.kernels.backend import Batch
from tinygpt.kernels.cpu import native
from tinygpt.kernels.cpu.model import take_steps
from tinygpt.kernels.cpu.simd.targets import TARGET, has_feature
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
OBJECTS = json.loads(native.MANIFEST.read_text("ascii"))["targets"]
CHUNKS = [1] * 10 + [7, 63, 1, 19]  # decode steps, a prefill across a border of key blocks
TOKENS = np.random.default_rng(0).integers(EOS, size=sum(CHUNKS)).tolist()


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


def probe(dtype: str, output: Path) -> None:
    whole = whole_logits(dtype)
    pieces = logits_in_pieces(dtype)
    assembly = "".join(take_steps.compiled.inspect_asm().values())
    wide = [register for register in ("ymm", "zmm") if register in assembly]
    np.savez(
        output, whole=whole, pieces=pieces, wide=np.array(wide, str), size=len(assembly), target=TARGET.name
    )


# In the tests.


def computed_on(cpu_name: str, features: str, dtype: str, folder: Path, **variables: str) -> dict:
    file = folder / "computed.npz"
    cpu_choice = {"NUMBA_CPU_NAME": cpu_name, "NUMBA_CPU_FEATURES": features}
    environment = {**os.environ, **cpu_choice, "NUMBA_CACHE_DIR": str(folder / "cache"), **variables}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [sys.executable, __file__, dtype, str(file)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    with np.load(file) as output:
        return dict(output)


def check_bits(found: dict, dtype: str) -> None:
    same_bits(found["pieces"], found["whole"])
    # In bfloat16 too: AVX-512's product of pairs takes numbers below 1e-38 for 0, and the demo's steps meet none.
    if dtype != "bfloat16" or not TARGET.has_amx:  # which sums in an order of its own: test_amx.py
        same_bits(found["whole"], whole_logits(dtype))


OF_OBJECTS = [(name, dtype) for name in OBJECTS for dtype in cpu.DTYPES]
# Every day all objects for AVX2, the least CPU, and of each other's the dtype with the most kinds of instructions.
DAILY = [case for case in OF_OBJECTS if case[0] == "AVX2" or case[1] == "int8"]


@pytest.mark.skipif(native.objects() is None, reason=native.status())
@pytest.mark.parametrize(("name", "dtype"), daily(OF_OBJECTS, DAILY))
def test_objects_for_another_cpu(name, dtype, tmp_path):
    features = OBJECTS[name]["features"]
    if not all(map(has_feature, features)):
        pytest.skip("this CPU lacks an instruction")
    if name == TARGET.name:
        pytest.skip("these objects are for this CPU itself")
    asked = ",".join(f"+{feature}" for feature in features)
    found = computed_on(OBJECTS[name]["cpu"], asked, dtype, tmp_path)
    assert (found["target"], found["size"]) == (name, 0)  # no step has compiled
    check_bits(found, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in TARGETS for dtype in TARGETS[name].dtypes]
)
def test_a_cpu_without_avx512(name, dtype, tmp_path):
    if not has_feature("avx512f"):
        pytest.skip("this CPU's kernels are the fallback already")
    if name == "AVX2 VNNI" and not has_feature("avxvnni"):
        pytest.skip("this CPU has no AVX-VNNI")
    target = TARGETS[name]
    found = computed_on(target.cpu, target.features, dtype, tmp_path, TINYGPT_KERNELS="compile")
    assert found["size"] > 0
    assert target.registers not in found["wide"], "the restriction had no effect"
    check_bits(found, dtype)


if __name__ == "__main__":
    probe(sys.argv[1], Path(sys.argv[2]))
