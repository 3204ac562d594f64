"""The threads that share a step, where their memory lies, and the choice of compiled code by type.

May import simd and jit.
"""
