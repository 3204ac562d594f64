"""The driver, how kernels are compiled and kept, inline PTX. Imports nothing else of the backend."""
