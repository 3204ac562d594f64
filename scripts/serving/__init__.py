"""What bench_serving.py and soak_server.py ask of a server, and how they measure it."""
