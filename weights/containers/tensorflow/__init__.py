"""TensorFlow's tensor bundle, the table that indexes it, and their checksum.

Belongs here: what no other program's files have. May import `container`, `mapped_file`, `peek`, `protobuf` and
`read_ahead`.
"""
