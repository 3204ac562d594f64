"""One module for each subcommand: its flags (`add_arguments`) and what it does (`run`)."""
