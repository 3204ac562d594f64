"""Why a request is refused, in its client's words: the field as it was sent, and what it may be.

Belongs here: sentences, and what they are made from. May import protocol.
"""
