"""Checkpoints that `convert` writes for other programs."""
