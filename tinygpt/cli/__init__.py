"""The command line: parser, flags, messages and exit codes; a module of `commands/` for each command.

Belongs here: whatever reads arguments or writes to a terminal. May import everything of tinygpt; nothing imports it.
"""
