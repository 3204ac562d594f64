"""The command line: parser, flags, messages and exit codes; a module of `commands/` for each command.

Belongs here: whatever reads arguments or writes to a terminal. `main` finds the command; `parser` is argparse with
advice; `loading` loads the model that the flags choose, and `ranks` starts those who share it. `flags/` are what
several commands take, `input/` what they read, `output/` what they say. `batch/` answers the prompts of a file,
`interactive` those of a terminal. May import everything of tinygpt; nothing imports it.
"""
