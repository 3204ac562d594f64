"""Checkpoints that `convert` writes: packed for the CPU's kernels, or for other programs."""
