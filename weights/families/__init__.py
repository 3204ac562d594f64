"""One module for each way in which files name and lay out a model; `table` is where a source finds its own.

Belongs here: what names, layouts and configurations mean; a room holds those of one origin, and beside the rooms lies
what they have in common. Only JSON files beside the weights are opened here. May import the model's config, the
errors, and weights' containers, parameters, tensors and JSON reader.
"""
