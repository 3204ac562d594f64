"""A Hugging Face Hub on the loopback interface: the few requests by which huggingface_hub downloads a model."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".h5")  # kept elsewhere by the Hub, which redirects to them


class HubServer:
    """Serves `folders` by repository id while it is entered as a context.

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

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""

    def _answer(self) -> None:
        hub: HubServer = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        kind = "api" if path.startswith("/api/models/") else "cdn" if path.startswith("/cdn/") else "file"
        rest = path.removeprefix("/api/models/" if kind == "api" else "/cdn/" if kind == "cdn" else "/")
        repo = next((repo for repo in hub.folders if rest == repo or rest.startswith(repo + "/")), None)
        if repo is None:
            self._fail(401, "RepoNotFound")
        elif kind == "api":
            self._describe(repo, hub.folders[repo], rest)
        elif repo in hub.gated:
            self._fail(401, "GatedRepo")
        else:
            self._file(hub, kind, repo, rest)

    def _describe(self, repo: str, folder: Path, rest: str) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = {path: path.relative_to(folder).as_posix() for path in files}
        if "/tree/" in rest:
            value = [
                {"type": "file", "path": names[path], "size": path.stat().st_size, "oid": _digest(path)}
                for path in files
            ]
        else:
            siblings = [{"rfilename": name} for name in names.values()]
            value = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, hub: HubServer, kind: str, repo: str, rest: str) -> None:
        name = rest.removeprefix(repo + "/").removeprefix(f"resolve/{COMMIT}/").removeprefix("resolve/main/")
        path = hub.folders[repo] / name
        if not path.is_file():
            self._fail(404, "EntryNotFound")
            return
        etag, data = f'"{_digest(path)}"', path.read_bytes()
        if kind == "file" and name.endswith(LARGE):
            linked = {
                "X-Linked-Etag": etag,
                "X-Linked-Size": str(len(data)),
                "Location": f"{hub.url}/cdn/{repo}/{name}",
            }
            self._send(302, b"", {"X-Repo-Commit": COMMIT, **linked})
        else:
            self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": etag})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
