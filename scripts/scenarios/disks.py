"""Disks that are full or may not be written to, folders that are not this user's, and users without a home."""

import os
import resource
import shutil
import subprocess
from functools import cache
from pathlib import Path
from random import Random

from .lab import PROMPT, Lab, Run, Skipped, read_records

SIZES = (0, 1, 100, 4_000, 8_192, 20_000, 60_000, 200_000, 1_000_000, 6_000_000)


@cache
def need_mounts() -> None:
    """Skipped where this user cannot mount a file system for a process alone."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
    ):
        raise Skipped("mounting needs root and unshare")


def in_namespace(script: str) -> tuple[str, ...]:
    """A wrapper that does this, as root of a mount namespace of its own, before the program runs."""
    need_mounts()
    return ("unshare", "-m", "sh", "-ec", f'{script}; exec "$@"', "sh")


def on_small_disk(folder: Path, size: int) -> tuple[str, ...]:
    return in_namespace(f"mount -t tmpfs -o size={max(size // 4096, 1) * 4096} none '{folder}'")


def limit_files(size: int):
    """For preexec_fn: no file can become larger."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def full_output(lab: Lab, generator: Random) -> str | None:
    """At any byte, then continued."""
    expected, output = lab.records, lab.new_folder() / "out.jsonl"
    size = generator.randint(0, 30_000)
    run = lab.run(*lab.batch(output), preexec_fn=limit_files(size))
    if problem := run.problem(""):
        return f"{size} bytes: {problem}"
    if run.code and str(output) not in run.err:
        return f"{size} bytes: no file is named in {run.err!r}"
    if output.exists():
        whole = output.read_bytes().rpartition(b"\n")[0]
        kept = lab.new_folder() / "kept"
        kept.write_bytes(whole + b"\n" * bool(whole))
        if any(expected[name] != record for name, record in read_records(kept).items()):
            return f"{size} bytes: a record is another"
    return lab.run(*lab.batch(output)).problem("", may_fail=False) or lab.problem_of_records(output)


def full_output_disk(lab: Lab, generator: Random) -> str | None:
    folder, size = lab.new_folder(), generator.choice(SIZES)
    run = lab.run(*lab.batch(folder / "out.jsonl"), wrapper=on_small_disk(folder, size))
    return run.problem("") or (str(folder) not in run.err and run.code and f"no file is named in {run.err!r}") or None


def full_stdout(lab: Lab, generator: Random) -> str | None:
    flags, expected = generator.choice([((), lab.text), (("--no-stream",), lab.text)])
    path, size = lab.new_folder() / "text", generator.randint(0, len(expected.encode()) + 1)
    with path.open("w") as file:
        run = lab.run(*PROMPT, *flags, stdout=file, preexec_fn=limit_files(size))
    # A limit on all files also keeps what is compiled from being kept; that is no error.
    said = Run(run.code, path.read_text(errors="replace"), run.err).problem(expected)
    return f"{size} bytes: {said}" if said else None


def full_convert(lab: Lab, generator: Random) -> str | None:
    folder, size = lab.new_folder(), generator.choice((*SIZES, generator.randint(0, 10**7)))
    run = lab.run("convert", "demo", str(folder / "int8"), preexec_fn=limit_files(size))
    if problem := run.problem(""):
        return f"{size} bytes: {problem}"
    if run.code == 0:
        return lab.run(*PROMPT, "--model", str(folder / "int8")).problem(lab.converted_text, may_fail=False)
    left = [str(path) for path in folder.iterdir()]
    if left or str(folder) not in run.err:
        return f"{size} bytes: {left} are left, and it says {run.err!r}"
    return None


def full_cache(lab: Lab, generator: Random) -> str | None:
    """The disk fills while kernels compile."""
    folder, size = lab.new_folder(), generator.choice(SIZES)
    run = lab.run(*PROMPT, wrapper=on_small_disk(folder, size), env={"XDG_CACHE_HOME": folder, "NUMBA_CACHE_DIR": None})
    return (problem := run.problem(lab.text, may_fail=False)) and f"{size} bytes: {problem}"


def read_only_home(lab: Lab, generator: Random) -> str | None:
    folder = lab.new_folder()
    script = f"mount -t tmpfs none '{folder}'; mount -o remount,ro '{folder}'"
    env = {"HOME": folder, "XDG_CACHE_HOME": None, "NUMBA_CACHE_DIR": None}
    if generator.random() < 0.5:
        script, env = script + f"; mount --bind '{folder}' /tmp", {**env, "TMPDIR": folder}
        return lab.run(*PROMPT, wrapper=in_namespace(script), env=env).problem(lab.text)  # nowhere at all
    return lab.run(*PROMPT, wrapper=in_namespace(script), env=env).problem(lab.text, may_fail=False)


def cache_of_another_version(lab: Lab, generator: Random) -> str | None:
    """Other builds' folders, files where folders should be, and things that nobody knows."""
    cache = lab.new_folder()
    (cache / "tinygpt" / "kernels-0123456789abcdef" / "x").mkdir(parents=True)
    (cache / "tinygpt" / "kernels-0123456789abcdef" / "x" / "y.nbi").write_bytes(generator.randbytes(99))
    (cache / "tinygpt" / "stray").write_bytes(generator.randbytes(99))
    env = {"XDG_CACHE_HOME": cache, "NUMBA_CACHE_DIR": None}
    if generator.random() < 0.5:
        env["XDG_CACHE_HOME"] = cache / "tinygpt" / "stray"  # a file
    return lab.run(*PROMPT, env=env).problem(lab.text, may_fail=False)


def another_user(lab: Lab, generator: Random) -> str | None:
    if os.getuid():
        raise Skipped("to become another user needs root")
    home = generator.choice([None, "/nonexistent", "/", lab.new_folder(), lab.new_folder() / "absent"])
    if isinstance(home, Path) and home.exists():
        os.chown(home, 12345, 12345)
    env = {"HOME": home, "XDG_CACHE_HOME": None, "NUMBA_CACHE_DIR": None, "USER": None, "LOGNAME": None}
    os.chmod(lab.folder, 0o755)
    try:
        run = lab.run(*PROMPT, user=12345, group=12345, extra_groups=[], env=env)
    except PermissionError as error:
        raise Skipped(f"another user may not run {error.filename}") from None
    return run.problem(lab.text, may_fail=False)


SCENARIOS = {full_output: 6, full_output_disk: 2, full_stdout: 4, full_convert: 3}
SLOW = {full_cache: 2, read_only_home: 1, cache_of_another_version: 1, another_user: 1}
