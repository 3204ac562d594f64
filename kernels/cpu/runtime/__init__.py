"""The threads of a step: a team that goes from phase to phase without locks. May import simd and jit."""
