"""The machine: its threads, its name, its memory bandwidth. May import errors alone."""
