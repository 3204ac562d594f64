"""From a checkpoint's matrices to panels in each dtype, once, at load. May import layers, runtime, simd and jit."""
