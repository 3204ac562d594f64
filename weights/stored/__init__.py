"""Files in formats of tinygpt's own: converted checkpoints and saved sessions.

Belongs here: writing them, and checking them when they are read back. May import all of weights but `open` and
adapters.
"""
