"""Ways in which files name and lay out a model, and its configuration there; `matching` finds a source's own."""
