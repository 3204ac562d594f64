"""Between sockets and forms: the address, connections, who may ask, a body that is read, a reply that is written.

Belongs here: what is HTTP, whatever is asked for. May import protocol, refusals, work, `state`, `record`, `metrics`.
"""
