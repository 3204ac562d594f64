"""One model on several ranks: processes, perhaps of several hosts, each with a part of the layers.

Belongs here: the parts, the messages between ranks, and how ranks start and end. The engine of rank 0 runs over a
`ParallelRunner`, which has the interface of a ModelRunner.
"""
