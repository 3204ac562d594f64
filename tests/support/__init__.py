"""Helpers of the tests: they make checkpoints, call kernels alone and stand in for what is absent."""
