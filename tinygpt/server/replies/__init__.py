"""What replies of several routes have in common: names of tokens, log probabilities as JSON has them, events.

Belongs here: how something is written. May import protocol and `transport.event_stream`.
"""
