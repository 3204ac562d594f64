"""The answers: a module for each group of paths, which reads a checked request, asks the engine and writes the reply."""
