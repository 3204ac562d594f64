"""torch's files, which are pickles and storages, read without torch and without executing what they say.

Belongs here: the pickle machine, the zip archive that torch lays out, and the tensors in both. May import `container`,
`mapped_file`, `peek` and `read_ahead`. Whoever packs several such files is in `ranks`.
"""
