"""The kernels of a step, by layer. A `..._kernel` function returns a kernel; its docstring has the grid."""
