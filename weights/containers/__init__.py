"""One module or room for each file format; `formats` has the tables by which that of a file or a folder is found.

Belongs here: which tensors a file holds and how their elements are decoded. A container knows nothing of any model.
Beside the rooms lies what several of them stand on, and formats of a module each.
May import the errors, `regular_file`, and weights' JSON reader, field checks, messages and tensors.
"""
