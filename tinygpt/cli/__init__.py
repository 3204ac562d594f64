"""The command line: parser, flags, messages and exit codes; a module of `commands/` for each command.

Belongs here: whatever reads arguments or writes to a terminal. `main` finds the command; `parser` is argparse with
advice; `wording` puts the library's sentences into the words of the shell, or of JSON. `model_flags` and
`sampling_flags` hold the flags of LLM and of SamplingParams, `flags` their types; `text_input` reads files and stdin;
`loading` loads the model that the flags choose; `batch` answers the prompts of a file, `interactive` those of a
terminal; `report` and `results_file` write what a command found. May import everything of tinygpt; nothing imports it.
"""
