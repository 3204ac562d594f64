"""What `scripts/many_threads.py` is made of."""
