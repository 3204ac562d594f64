"""A Hugging Face Hub on the loopback interface: the few requests by which huggingface_hub downloads a model."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".h5")  # kept elsewhere by the Hub, which redirects to them


class HubServer:
    """Serves `folders` by repository id, or id@branch, while it is entered as a context.

    `gated` ids show themselves but not their files. `requests` lists what was asked for: ("GET", "/path").
    """

    def __init__(self, folders: dict[str, Path], gated: set[str] | None = None):
        self.folders = folders
        self.gated = gated or set()
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloaded(self) -> list[str]:
        """The names of the files whose content was asked for, in order of name."""
        paths = {path for method, path in self.requests if method == "GET" and not path.startswith("/api/")}
        return sorted({path.rpartition("/")[2] for path in paths})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        hub: HubServer = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        kind = next((kind for kind in ("/api/models/", "/cdn/") if path.startswith(kind)), "/")
        rest = path.removeprefix(kind)
        repo = next((repo for repo in hub.folders if rest == repo or rest.startswith(repo + "/")), None)
        if repo is None:
            self._fail(401, "RepoNotFound")
            return
        found = re.fullmatch(r"/(revision|tree|resolve)/([^/?]+)/?(.*)", rest.removeprefix(repo))
        what, revision, name = found.groups() if found else ("", "main", "")
        branches = [key for key in hub.folders if key.startswith(f"{repo}@")]
        branch = next((key for key in branches if revision in (key.partition("@")[2], _commit(key))), None)
        if branch is None and revision not in ("main", COMMIT):
            self._fail(404, "RevisionNotFound")
            return
        folder = hub.folders[branch or repo]
        self.commit = _commit(branch) if branch else COMMIT
        if kind == "/api/models/":
            self._describe(repo, folder, is_tree=what == "tree")
        elif repo in hub.gated:
            self._fail(401, "GatedRepo")
        else:
            self._file(folder / name, None if kind == "/cdn/" else f"{hub.url}/cdn{path}")

    do_HEAD = do_GET

    def _describe(self, repo: str, folder: Path, is_tree: bool) -> None:
        files = {
            path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
        }
        value = [
            {"type": "file", "path": n, "size": p.stat().st_size, "oid": _digest(p)} for n, p in files.items()
        ]
        if not is_tree:
            siblings = [{"rfilename": name} for name in files]
            value = {"id": repo, "modelId": repo, "sha": self.commit, "private": False, "siblings": siblings}
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path, elsewhere: str | None) -> None:
        if not path.is_file():
            self._fail(404, "EntryNotFound")
            return
        etag = f'"{_digest(path)}"'
        data = path.read_bytes()
        if elsewhere and path.name.endswith(LARGE):
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data)), "Location": elsewhere}
            self._send(302, b"", {"X-Repo-Commit": self.commit, **linked})
        else:
            self._send(200, data, {"X-Repo-Commit": self.commit, "ETag": etag})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _commit(branch: str) -> str:
    return hashlib.sha1(branch.encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
