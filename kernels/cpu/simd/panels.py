"""How a panel of weights and a group of activations lie in memory, and how tiles ask for what they will need."""

from llvmlite import ir

from tinygpt.kernels.cpu.simd.vector_ir import LANES, VECTOR_BYTES, prefetch

PANEL_VECTORS = 4
ROW_BYTES = PANEL_VECTORS * VECTOR_BYTES  # of a panel: what a step of all its columns multiplies
GROUP = 64  # values of K that share an activation's scale
WEIGHT_GROUP = 32  # values of K that share an int4 weight's scale and offset
SCALES_BYTES = 4 * 4  # of a row's group in Int8Operand.scales: its four entries
WEIGHT_SCALES_BYTES = 2 * PANEL_VECTORS * LANES * 2  # of a panel's WEIGHT_GROUP: bfloat16 scales, then offsets


def ask_ahead(builder, ahead, spacing, first, count: int) -> None:
    """Prefetch `count` places `spacing` apart, of which `first` come before, after `ahead`, into the L2 cache.

    In L1 they would take the room of the chunk that several rows work on, and of the few lines that it can wait for at
    a time. With nothing to ask for, `spacing` is 0: one line again and again costs less than a branch in every step.
    """
    for i in range(count):
        number = builder.add(first, ir.Constant(first.type, i))
        prefetch(builder, builder.add(ahead, builder.mul(number, spacing)), level=2)


def ask_part_ahead(builder, ahead, spacing, number, lines: int, strips: int) -> None:
    """Of the lines that a row of B asks for, those of one strip of it: `number` strips come before it."""
    if lines >= strips:
        first = builder.mul(number, ir.Constant(number.type, lines // strips))
        ask_ahead(builder, ahead, spacing, first, lines // strips)
    else:  # several strips share a line
        part = builder.udiv(spacing, ir.Constant(spacing.type, strips // lines))
        ask_ahead(builder, ahead, part, number, 1)
