"""Which build was measured."""

import subprocess

import tinygpt
from tinygpt.bench.build import Build


def git(folder, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_the_build_is_the_commit(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    for message in ("one", "two"):
        git(tmp_path, "commit", "--allow-empty", "-m", message)
    clean = Build.find(tmp_path)
    assert len(clean.commit) == 8
    assert clean.number == 2
    (tmp_path / "file").write_text("2")
    assert Build.find(tmp_path) == Build(f"{clean.commit}+", 2)


def test_without_a_checkout_the_build_is_the_version(tmp_path):
    assert Build.find(tmp_path) == Build(tinygpt.__version__, 0)
    (tmp_path / ".git").mkdir()  # none that git knows
    assert Build.find(tmp_path) == Build(tinygpt.__version__, 0)
