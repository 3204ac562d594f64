"""The GPU without a model: its driver and graphs, compilation, inline PTX, reductions of warps, and peak rates."""
