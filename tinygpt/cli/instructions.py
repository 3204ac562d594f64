"""Which of this CPU's instructions the kernels use."""


def instructions() -> dict[str, str]:
    """The instructions that each dtype's products are made of."""
    from tinygpt.kernels.cpu.jit import has_feature
    from tinygpt.kernels.cpu.simd import tiles

    plain = "AVX2" if has_feature("avx2") else "what LLVM makes of 16 lanes, which is slow"
    vectors = "AVX-512" if tiles.HAS_AVX512 else plain
    integers = "AVX-512 VNNI" if tiles.HAS_VNNI else f"{vectors}, no VNNI"
    return {
        "float32": vectors,
        "bfloat16": "AVX-512 BF16" if tiles.HAS_BF16 else f"{vectors}, bfloat16 widened to float32",
        "int8": integers,
        "int4": integers,
    }
