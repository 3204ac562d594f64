"""The step loop and what it needs to know of many requests: schedule, run, sample, record.

Belongs here: whatever decides which sequences take part in a step and what becomes of its tokens; how requests come in
(`input_processor`, `scoring`, `service`), and a look inside (`probe`). May import sampling, execution, request and
below.
"""
