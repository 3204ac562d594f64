"""The kernels of a step, one module for each kind of layer, with the device functions that they share.

A `..._kernel` is made for a dtype and sizes that the compiler is to know; its docstring says on which grid it runs.
Which kernel a step takes is decided in `launches.py`.
"""
