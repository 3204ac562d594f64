"""One model on several ranks: processes, perhaps of several hosts, each with a part of the layers.

Belongs here: who holds what, what ranks send one another, and how they start and end. Nobody above knows of ranks: rank
0 runs the engine over a `ParallelRunner`, which has the face of a ModelRunner, and the others follow it.
"""
