"""How weights are held in each dtype, and made so when a checkpoint is loaded. May import simd and runtime."""
