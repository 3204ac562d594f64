"""How fast a model runs, and how near that is to what the machine allows: the core of `python -m tinygpt bench`."""
