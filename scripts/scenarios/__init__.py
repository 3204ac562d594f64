"""What scripts/faults.py does to tinygpt: one module for each kind of fault, and in lab.py what all of them need.

A scenario is a function of the lab and a random generator. It does one thing to a process, and returns what is wrong
with how that ended, or None. `SCENARIOS` in each module lists its own.
"""
