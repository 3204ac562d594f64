"""The first run on an unknown GPU: what the CUDA kernels rely on, one item after another."""
