"""From rows of logits to tokens on the device. May import runtime."""
