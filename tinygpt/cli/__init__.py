"""The commands. `bench`, `evaluation` and `on_ray` import its flags and streams."""
