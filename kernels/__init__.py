"""Arithmetic only, a folder for each backend: `reference` (NumPy, the specification), `cpu` (Numba), `cuda` (a GPU)."""
