"""Engines that bench_peers.py measures, each in a process and a virtual environment of its own."""
