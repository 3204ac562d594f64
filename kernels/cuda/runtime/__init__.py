"""What stands between the kernels and the GPU, and knows nothing of a model.

The driver (`device.py`), how kernels are compiled and kept, graphs of them, arrays in parts, inline PTX, and what the
threads of a warp or of a block compute together.
"""
