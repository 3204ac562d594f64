"""Steps of a small batch in one cooperative kernel. May import every other folder of the backend."""
