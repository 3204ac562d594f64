"""From rows of logits to tokens on the device: processors, a draw, and its search; sampling.py is the entry."""
