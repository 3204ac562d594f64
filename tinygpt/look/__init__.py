"""The look inside a model: captures, edits, caches of activations, and their pictures."""
