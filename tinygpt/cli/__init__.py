"""The commands. They share `flags`, `streams` and `loading`. Of the other packages, only `on_ray` imports this one."""
