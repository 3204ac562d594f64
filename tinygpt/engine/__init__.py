"""The step loop and what it needs to know of many requests: schedule, run, sample, record.

Belongs here: whatever decides which sequences take part in a step and what becomes of its tokens. May import sampling,
execution, request and below.
"""
