"""One module for each file format: which tensors a file holds and where they lie in it.

Belongs here: readers that know nothing of any model. May import errors and weights' JSON reader.
"""
