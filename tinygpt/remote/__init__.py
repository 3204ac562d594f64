"""A model that runs behind a server, `tinygpt serve`, with the face of an LLM in this process.

Nothing here computes, and nothing is imported that does: neither NumPy nor Numba. `wire` is what both ends write and
read, so that what comes back is what the server's LLM has returned, to the bit.
"""
