"""One module for each file format; `formats` has the tables by which the format of a file or a folder is found.

Belongs here: which tensors a file holds and how their elements are decoded. A container knows nothing of any model.
May import the errors, `regular_file`, and weights' JSON reader, field checks, messages and tensors.
"""
