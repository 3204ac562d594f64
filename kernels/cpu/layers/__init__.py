"""The kernels of a step, a module for each kind of layer, and the records that they read (`formats.py`)."""
