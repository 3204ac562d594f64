"""One model on several ranks: processes, perhaps of several hosts, each with a part of the layers.

Belongs here: the parts, the messages between ranks, and how ranks start and end.
"""
