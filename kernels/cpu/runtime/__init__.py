"""How kernels are compiled and kept, and the threads that share a step. Imports nothing else of the backend."""
