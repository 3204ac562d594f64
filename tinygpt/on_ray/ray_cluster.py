"""The Ray cluster of `generate --ray`: joined or started, known to have room, and quiet."""

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from tinygpt.cli.output import counted, log
from tinygpt.errors import RequestError, TinyGPTError, how_to_install

OBJECT_STORE = 128 * 2**20  # bytes; prompts and records pass through it, and no weights
SECONDS_TO_ANSWER = 5
# Ray reads these when it is imported: no word goes out, and progress is ours to show.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
STATUS = "__autoscaling_status"  # where Ray's monitor, which every cluster has, keeps what it last saw
READ_ONLY = "node_"  # how it names a host's type that it only watches, by which no other can be added

logger = logging.getLogger(__name__)


def import_ray() -> Any:
    """Return the module, with ray.data. Raise RequestError if it is missing."""
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise RequestError(f"--ray needs {error.name}, which comes with: {how_to_install('ray')}.") from None
    # The log's file in Ray's folder has the same lines.
    rays = logging.getLogger("ray.data")
    for handler in [h for h in rays.handlers if isinstance(h, logging.StreamHandler)]:
        rays.removeHandler(handler)
    return ray


@contextmanager
def joined(ray: Any, count: int, threads: int) -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS, or start one of this machine that ends with the block.

    Raise RequestError if it has no room for `count` actors of `threads` CPUs, TinyGPTError if Ray cannot continue.
    """
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    logs = "its log folder"
    try:
        with ExitStack() as stack:
            log("starting Ray")
            stack.callback(ray.shutdown)
            if address := os.environ.get("RAY_ADDRESS"):
                _check_answers(address)
                context = _connected(ray, address, quiet)
            else:  # beside the actors' CPUs, Ray has one for itself
                size = {"num_cpus": count * threads + 1, "object_store_memory": OBJECT_STORE}
                context = ray.init("local", include_dashboard=False, **size, **quiet)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray has one of its own, which would tell nobody how to go on
            if address:
                _check_room(ray, address, count, threads)
            if folder := getattr(context, "address_info", {}).get("session_dir"):  # none of a cluster behind ray://
                logs = Path(folder, "logs")
                errors = logs / f"tinygpt-{os.getpid()}.err"
                if _can_be_parted(errors):
                    stack.enter_context(_native_stderr_in(errors))
                    stack.enter_context(_said_in(errors))
            yield
    except ray.exceptions.RayError as error:
        raise TinyGPTError(f"Ray has given up: {_last_line(error)} ({logs} says more)") from error


def _connected(ray: Any, address: str, quiet: dict[str, Any]) -> Any:
    try:
        return ray.init(address, **quiet)
    except (ValueError, RuntimeError, ConnectionError) as error:  # what it is depends on the address
        raise TinyGPTError(f"RAY_ADDRESS is {address!r}, and Ray cannot use that: {_last_line(error)}") from error


def _check_answers(address: str) -> None:
    """Raise TinyGPTError if no cluster listens: Ray would retry for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not port.isdecimal():  # such as auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise TinyGPTError(f"RAY_ADDRESS is {address!r}, and no cluster answers there: {error}.") from error


def _check_room(ray: Any, address: str, count: int, threads: int) -> None:
    """Raise RequestError for actors that would wait for ever; log if some have to wait."""
    hosts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]  # CPUs of each
    room, asked = sum(cpus // threads for cpus in hosts), count * threads
    has = f"the Ray cluster at {address} has {sum(hosts)} on {counted(len(hosts), 'host')}"
    if room < count and not _may_grow():
        fewer = f"--ray {room}" if room else f"--threads {max(hosts)} or fewer" if max(hosts) else "it another host"
        raise RequestError(
            f"--ray {count} of --threads {threads} need {asked} CPUs and {has}, room for {room}: give {fewer}."
        )
    if room < count:
        log(f"{count} actors need {asked} CPUs and {has}, room for {room}: the others wait until it adds hosts")
    elif (free := int(ray.available_resources().get("CPU", 0))) < asked:
        log(f"{count} actors need {asked} CPUs and {has}, {free} of them free: some wait until others end")


def _may_grow() -> bool:
    """Return whether the cluster has an autoscaler; True if Ray cannot tell."""
    try:
        from ray.autoscaler.v2.utils import is_autoscaler_v2
        from ray.experimental.internal_kv import _internal_kv_get

        if is_autoscaler_v2(fetch_from_server=True):
            return True
        status = json.loads(_internal_kv_get(STATUS) or "{}")
        types = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    except Exception:  # none of this is promised by Ray
        return True
    return any(not name.startswith(READ_ONLY) for name in types.values())


@contextmanager
def _native_stderr_in(path: Path) -> Iterator[None]:
    """Redirect the stderr of Ray's C++ code to a file; Python's stderr stays."""
    plain, ours = sys.stderr, os.dup(2)
    try:
        with (
            path.open("ab") as file,
            open(ours, "w", encoding=plain.encoding, errors=plain.errors, buffering=1, closefd=False) as sys.stderr,
        ):
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        sys.stderr = plain


@contextmanager
def _said_in(path: Path) -> Iterator[None]:
    """Redirect stdout to the file: Ray prints there when actors end."""
    with path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1) as file, redirect_stdout(file):
        yield


def _can_be_parted(path: Path) -> bool:
    """Return whether stderr can be redirected: it is the process's own, without --debug, and the file is writable."""
    try:
        return sys.stderr.fileno() == 2 and not logger.isEnabledFor(logging.DEBUG) and os.access(path.parent, os.W_OK)
    except (OSError, ValueError):  # another stream stands in for it
        return False


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
