"""What a request has others do, the engine's thread or one of its own, while the event loop goes on.

Belongs here: submitting, what comes back, turns and threads. May import refusals.
"""
