"""`python -m tinygpt`, and the command `tinygpt`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
