"""The command line: flags, messages and exit codes, and a module for each command.

`main` finds the command. `flags`, `input`, `output` and `loading` are shared; `batch` and `interactive` belong to
`generate`. May import every room of tinygpt, and no room imports it.
"""
