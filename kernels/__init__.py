"""Arithmetic only: `reference` (NumPy, the specification) and `cpu` (Numba), one interface."""
