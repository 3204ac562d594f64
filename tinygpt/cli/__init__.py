"""The command line: flags, messages and exit codes, and the commands.

`flags`, `streams` and `loading` are shared; `batch` belongs to `generate`. No other room but `on_ray` imports
this one.
"""
