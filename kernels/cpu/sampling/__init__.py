"""From rows of logits to tokens: processors, warpers, the draw. May import simd and runtime."""
