"""How numbers lie on the device: dtypes, and the order of weights. NumPy alone, on the host."""
