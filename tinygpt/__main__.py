"""`python -m tinygpt`, and the command `tinygpt`."""

import sys

try:
    from tinygpt.cli.main import main
    from tinygpt.cli.ranks import one_of_all_speaks
except KeyboardInterrupt:  # while its modules are read, a fifth of a second
    print("\ntinygpt: interrupted", file=sys.stderr)
    sys.exit(130)

main = one_of_all_speaks()(main)

if __name__ == "__main__":
    sys.exit(main())
