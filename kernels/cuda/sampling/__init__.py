"""From rows of logits to tokens, on the device; `sampling.py` is where one begins to read.

First `processors.py` changes scores; then `argmax.py` finds the greatest one, and where the temperature asks for it
`draw.py` filters (`warpers.py`, by the searches of `search.py`) and draws. `buffers.py` is the memory of all that.
"""
