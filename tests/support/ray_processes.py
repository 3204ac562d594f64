"""The processes of a Ray cluster that a test has started, found below one of them; each is named by what runs in it."""

from pathlib import Path


def ray_processes(root: int, name: str) -> list[int]:
    """Pids below `root` that Ray calls by a name that begins so: "MapWorker(" or "ServeReplica:"."""
    return [pid for pid in _below(root) if _title(pid).startswith(f"ray::{name}")]


def _below(root: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    found, below = {root}, []
    while more := [pid for pid, parent in parents.items() if parent in found and pid not in found]:
        found.update(more)
        below += more
    return below


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
