"""Which of this CPU's instructions the kernels use."""


def instructions() -> dict[str, str]:
    """The target that the kernels are compiled for, and the instructions that each dtype's products are made of."""
    from tinygpt.kernels.cpu.simd.targets import TARGET

    steps = {"float32": "multiply-adds", "bfloat16": TARGET.bfloat16, "int8": TARGET.int8, "int4": TARGET.int4}
    return {"target": TARGET.name, **steps, "int8 KV cache": TARGET.int8_cache}
