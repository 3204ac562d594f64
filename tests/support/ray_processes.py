"""The processes of a Ray cluster that a test has started, found below one of them; each is named by what runs in it."""

from pathlib import Path

from support.processes import below


def ray_processes(root: int, name: str) -> list[int]:
    """Pids below `root` that Ray calls by a name that begins so: "MapWorker(" or "ServeReplica:"."""
    return [pid for pid in below(root) if _title(pid).startswith(f"ray::{name}")]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
