"""Connections: keep-alive HTTP to one server, for any number of threads, and what is safe to try again."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tinygpt.errors import QueueFullError, RequestError, ServerError

BUSY = (429, 503)  # statuses of a server that has done nothing for a request, and may later
MAX_WAIT = 30.0  # seconds: longer than any server should say
FIRST_WAIT = 0.5  # doubled each time, where the server says nothing
START = "start it with `tinygpt serve`, or check the address"


class Connections:
    """Of one server. What a server has certainly not begun is tried again, `max_retries` times: a connection that is
    refused, and a status that says so. One that the server has closed while it was idle is opened anew.

    url: with or without the /v1 that OpenAI's clients are given. timeout: seconds that the server may be silent.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float, max_retries: int):
        self.url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        self.timeout, self.max_retries = timeout, max_retries
        parts = urlsplit(self.url)
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError:
            self._host = None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise RequestError(f"url is {url!r} and must be a server's, such as http://127.0.0.1:8000.")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("api_key holds characters that cannot be sent: it must be printable ASCII.")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._has_key = api_key is not None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """What a path tells, at once or not at all."""
        with Exchange(self, max_retries=0) as exchange:
            exchange.send("GET", path)
            return exchange.json()

    def post(self, path: str, body: Any) -> Any:
        """The reply to what can be asked again without harm, as none of it is kept."""
        with self.exchange() as exchange:
            exchange.send("POST", path, body)
            return exchange.json()

    def exchange(self) -> "Exchange":
        return Exchange(self, self.max_retries)

    def close(self) -> None:
        """Close those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self.timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self.timeout, context=self._tls)

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.append(connection)


class Exchange:
    """A request and its reply, in one thread. Another may give it up, which the server notices."""

    def __init__(self, connections: Connections, max_retries: int):
        self._connections, self._max_retries = connections, max_retries
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, method: str, path: str, body: Any = None) -> None:
        """Raises ServerError if there is no reply, and what the reply says if it refuses."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        num_tries = 0
        while True:
            try:
                response = self._try(method, path, data)
            except _Stale:
                continue
            except ConnectionRefusedError as error:
                if num_tries == self._max_retries:
                    raise self._gone(error) from error
                wait = None
            except (OSError, http.client.HTTPException) as error:
                raise self._gone(error) from error
            else:
                if response.status == 200:
                    return
                text = self._read()
                if response.status not in BUSY or num_tries == self._max_retries:
                    raise self._refusal(response.status, text)
                wait = response.headers.get("Retry-After", "")
            self._given_up.wait(_seconds(wait, num_tries))
            num_tries += 1

    def json(self) -> Any:
        return self._parse(self._read())

    def events(self) -> Iterator[Any]:
        """The values of a stream's events, up to its end; ServerError if it ends before that."""
        try:
            for line in self._response:
                if line.startswith(b"data: [DONE]"):
                    self._read()
                    return
                if line.startswith(b"data: "):
                    event = self._parse(line[6:])
                    if "error" in event:
                        raise ServerError(f"{self._connections.url} has ended the request: {_message(event)}")
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        raise ServerError(f"{self._connections.url} has ended its reply too early: is it still running?")

    def give_up(self) -> None:
        """From any thread: what waits for the server raises, and the server frees what the request holds."""
        self._given_up.set()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """A reply that was not read to its end is not read any further."""
        with self._lock:
            connection, self._connection, self._socket = self._connection, None, None
        if self._response is not None:
            self._response.close()
        if connection is not None:
            connection.close()

    def _try(self, method: str, path: str, data: bytes | None) -> http.client.HTTPResponse:
        connection = self._connections._take()
        is_used = connection.sock is not None
        try:
            if not is_used:
                connection.connect()
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connection, self._socket = connection, connection.sock
            if self._given_up.is_set():
                raise ConnectionAbortedError("the request was given up")
            connection.request(method, self._connections._path + path, data, self._connections._headers)
            self._response = connection.getresponse()
        except (ConnectionResetError, BrokenPipeError) as error:  # RemoteDisconnected among them
            connection.close()
            if is_used and not self._given_up.is_set():
                raise _Stale from error
            raise
        except BaseException:
            connection.close()
            raise
        return self._response

    def _read(self) -> bytes:
        """The rest of the reply; the connection is then others' to use."""
        try:
            data = self._response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        with self._lock:
            connection, self._connection, self._socket = self._connection, None, None
        if connection is not None and connection.sock is not None and not self._given_up.is_set():
            self._connections._give_back(connection)
        return data

    def _parse(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise ServerError(f"{self._connections.url} is no tinygpt server: it does not speak JSON.") from None

    def _gone(self, error: Exception) -> ServerError:
        url = self._connections.url
        if isinstance(error, TimeoutError):
            return ServerError(
                f"{url} has said nothing for {self._connections.timeout:g} s: raise timeout, or look at it."
            )
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ServerError(f"{url} does not answer ({why}): {START}.")

    def _refusal(self, status: int, text: bytes) -> Exception:
        url = self._connections.url
        try:
            told = json.loads(text)
            message, code = told["error"]["message"], told["error"]["code"]
        except (ValueError, TypeError, LookupError):
            return ServerError(f"{url} is no tinygpt server: it answers with status {status}, and does not say why.")
        if status == 401:
            given = "another API key than the one given" if self._connections._has_key else "an API key"
            return ServerError(f"{url} wants {given}: set api_key, or the variable TINYGPT_API_KEY.")
        if status == 429:
            return QueueFullError(message)
        if status == 404 and code != "model_not_found":
            return ServerError(f"{url} is no tinygpt server, or an older one: it does not know what it was asked for.")
        return RequestError(message) if status in (400, 404, 413, 422) else ServerError(f"{url} refuses: {message}")


class _Stale(Exception):
    """The server had closed the connection before the request reached it."""


def _seconds(told: str | None, num_tries: int) -> float:
    """To wait before the next try; HTTP allows a date too, which is not worth reading."""
    return min(float(told), MAX_WAIT) if told and told.isdecimal() else FIRST_WAIT * 2**num_tries


def _message(event: Any) -> str:
    error = event["error"]
    return error["message"] if isinstance(error, dict) and "message" in error else str(error)
