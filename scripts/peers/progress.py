"""What the user sees while it goes on; stdout is for the table."""

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
