"""`generate --input`: many prompts from a file, answered here, by processes beside each other or by Ray, and kept.

`run` is the whole; `tasks` are its prompts with their answers, `workers` and `ray_actors` who else answers them;
`output_file` keeps the `records`.
"""
