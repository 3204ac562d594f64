"""The commands. Of other packages, only `on_ray` imports this one."""
