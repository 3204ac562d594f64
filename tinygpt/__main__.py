"""`python -m tinygpt`, and the command `tinygpt`."""

import sys

from tinygpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
