"""Which state of the code was measured."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import tinygpt

ROOT = Path(tinygpt.__file__).resolve().parents[1]
HASH_LENGTH = 8


@dataclass(frozen=True)
class Build:
    """In a checkout, `commit` is a hash, with "+" where files have changed, and `number` counts the commits up to it;
    elsewhere, they are the version and 0."""

    commit: str
    number: int

    @classmethod
    def find(cls, root: Path = ROOT) -> "Build":
        """The build of the package that lies in `root`."""
        if (root / ".git").exists():
            try:
                commit = _git(root, "rev-parse", f"--short={HASH_LENGTH}", "HEAD")
                changes = _git(root, "status", "--porcelain", "--untracked-files=no")
                return cls(commit + "+" * bool(changes), int(_git(root, "rev-list", "--count", "HEAD")))
            except (OSError, subprocess.CalledProcessError):  # no git, or none that trusts this folder
                pass
        return cls(tinygpt.__version__, 0)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
