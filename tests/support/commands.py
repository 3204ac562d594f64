"""The command line, run in this process or in one of its own."""

import re
import subprocess
import sys

from support.paths import ROOT
from tinygpt.cli import main as cli

# What `generate` ends with on stderr: the number of tokens after the first, and the seed.
STATS = re.compile(
    r"tinygpt: prompt \d+ tokens?(?:, [\d.]+ tokens/s)?; generation (\d+) tokens?(?:, [\d.]+ tokens/s)?; "
    r"load [\d.]+ s(?:; seed (\d+))?\n"
)


class Outcome:
    """How a command line ended that was run in this process."""

    def __init__(self, capsys, words: list[str]):
        capsys.readouterr()
        try:
            self.code = cli.main(words)
        except SystemExit as exit_:  # argparse
            self.code = exit_.code
        self.out, self.err = capsys.readouterr()


class Result(Outcome):
    """That of one command. `arguments` may be one string of words without spaces."""

    def __init__(self, capsys, command: str, arguments: str | list[str]):
        super().__init__(capsys, [command, *(arguments.split() if isinstance(arguments, str) else arguments)])


def run_process(*arguments, **options) -> subprocess.CompletedProcess:
    """`python -m tinygpt` as a user starts it."""
    options = {"cwd": ROOT, "capture_output": True, **options}
    return subprocess.run([sys.executable, "-m", "tinygpt", *arguments], **options)
