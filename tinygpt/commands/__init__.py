"""One module for each subcommand of `python -m tinygpt`; imported only when it is asked for."""
