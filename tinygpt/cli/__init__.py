"""The commands. They share `flags` and `streams`. Of the other packages, only `on_ray` imports this one."""
