"""An experiment: several greedy decode steps of a small batch in one cooperative kernel.

It has never run on a device, and what kernel.py predicts of it is arithmetic. `scripts/gpu/first_contact.py` times it
beside the graphs of the usual way, on the first H200 there is: what it measures earns this folder its place or deletes
it, along with its tests. Nothing outside knows of it but one call, `multi_step` of `door.run_faster`.
"""
