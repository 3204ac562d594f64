"""Which peers there are: what to install for each, and the form of the checkpoint that it has for each dtype.

The modules named here import their engine, so they are only imported in its own virtual environment.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

DTYPES = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Peer:
    """`module` (in this package) has make(checkpoint, folder, dtype), unless it reads the checkpoint as it is, and
    Engine(folder, dtype, threads), see engine.py. It takes a kv_cache_dtype, too, if it `has_caches` to choose from."""

    name: str
    module: str
    requirements: tuple[str, ...]
    forms: dict[str, str]  # dtype -> what the peer calls it
    makes_files: bool = True
    has_caches: bool = False
    environment: dict[tuple[str, str], str] = field(default_factory=dict)  # (dtype, variable) -> value
    build_environment: dict[str, str] = field(default_factory=dict)
    build: str = ""  # what sets an environment apart that was built differently

    def variables(self, dtype: str) -> dict[str, str]:
        return {name: value for (key, name), value in self.environment.items() if key == dtype}


PEERS = (
    Peer(
        "transformers",
        "with_transformers",
        ("transformers==5.23.0", "torch==2.13.0", "numpy"),
        {"float32": "float32", "bfloat16": "bfloat16"},
        makes_files=False,
    ),
    Peer(
        "onnxruntime",
        "with_onnxruntime",
        # Its converter for GPT-2 knows nothing later of transformers.
        ("onnxruntime==1.31.0", "onnx", "transformers==4.38.2", "torch==2.13.0", "sympy", "coloredlogs", "psutil"),
        {"float32": "float32, fused", "int8": "int8, dynamic"},
    ),
    Peer(
        "ctranslate2",
        "with_ctranslate2",
        ("ctranslate2==4.8.5", "safetensors", "numpy"),
        {"float32": "float32, MKL", "int8": "int8"},
        environment={("float32", "CT2_USE_MKL"): "1"},
    ),
    Peer(
        "llama.cpp",
        "with_llama_cpp",
        ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors", "numpy"),
        {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"},
        has_caches=True,
        build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF"},
    ),
)
OURS = Peer("tinygpt", "with_tinygpt", (), {dtype: dtype for dtype in DTYPES}, makes_files=False, has_caches=True)
MACHINE = Peer("machine", "machine", (), {dtype: dtype for dtype in DTYPES}, makes_files=False)

# For LLVM's x86-64-v3, which is what most laptops have. Each library chooses by its own variable.
AVX2 = {
    "NUMBA_CPU_NAME": "x86-64-v3",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",
    "CT2_FORCE_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
NO_SWITCH = ("onnxruntime",)  # takes AVX-512 wherever it is
TOO_SLOW = {"transformers": "bfloat16"}  # torch without AVX-512: 1000 ms a step at batch 8, and half an hour in all


def held_to_avx2(peers: Iterable[Peer]) -> list[Peer]:
    """The peers as they are on a CPU without AVX-512, but for those that cannot be told, or take too long."""
    flags = "-DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
    held = []
    for peer in peers:
        if peer.name not in NO_SWITCH:
            build = {name: value.replace("-DGGML_NATIVE=ON", flags) for name, value in peer.build_environment.items()}
            forms = {dtype: form for dtype, form in peer.forms.items() if dtype != TOO_SLOW.get(peer.name)}
            held.append(replace(peer, forms=forms, build_environment=build, build="-avx2" if build else ""))
    return held
