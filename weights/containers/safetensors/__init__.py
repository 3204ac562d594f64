"""safetensors' files, and float8 as tinygpt keeps it in them.

Belongs here: what stands in such a file; shards of it are torch's too, and in `shards`. May import `container`,
`mapped_file` and `peek`.
"""
