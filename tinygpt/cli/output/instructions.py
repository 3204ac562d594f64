"""Which of this CPU's instructions the kernels use."""


def instructions() -> dict[str, str]:
    """The target that the kernels are compiled for, the instructions that each dtype's products are made of, and how
    many products each of them makes: that, beside the memory's bandwidth, is what a dtype may be expected to reach."""
    from tinygpt.kernels.cpu.simd.targets import PRODUCTS, SINGLES, TARGET

    steps = {"float32": SINGLES, "bfloat16": TARGET.bfloat16, "int8": TARGET.int8, "int4": TARGET.int4}
    steps |= {"int8 KV cache": TARGET.int8_cache}
    lanes = TARGET.vector_bytes // 4
    told = {dtype: f"{step}, {lanes * PRODUCTS[step]} products an instruction" for dtype, step in steps.items()}
    return {"target": TARGET.name, **told}
