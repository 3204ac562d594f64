"""`python -m tinygpt`, and the command `tinygpt`."""

import sys

try:
    from tinygpt.cli import main as cli
    from tinygpt.cli.ranks import one_of_all_speaks
except KeyboardInterrupt:  # while its modules are read, a fifth of a second
    print("\ntinygpt: interrupted", file=sys.stderr)
    sys.exit(130)


def main() -> int:
    """Run the command line of this process, and return its exit code."""
    with one_of_all_speaks():
        return cli.main()


if __name__ == "__main__":
    sys.exit(main())
