"""`python -m tinygpt`, and the command `tinygpt`."""

import sys

try:
    from tinygpt.cli.main import main
except KeyboardInterrupt:  # while its modules are read, a fifth of a second
    print("\ntinygpt: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
