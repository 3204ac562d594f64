"""The command line: parser, flags, messages and exit codes; a module of `commands/` for each command.

Belongs here: whatever reads arguments or writes to a terminal. `main` finds the command; `model_flags` and
`sampling_flags` hold the flags of LLM and of SamplingParams, `flags` their types; `loading` loads the model that they
choose; `batch` answers the prompts of a file, `interactive` those of a terminal; `report` and `results_file` write what
a command found. May import everything of tinygpt; nothing imports it.
"""
