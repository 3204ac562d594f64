"""The threads that share a step, and the choice of compiled code by type. May import simd and jit."""
