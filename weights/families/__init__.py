"""Ways in which files name and lay out a model, and its configuration there; `table` finds a source's own."""
