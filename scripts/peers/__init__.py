"""The engines that bench_peers.py compares, one module each, and what it takes to run them side by side."""
