"""Sockets: the address of a server is taken before anything is loaded."""

import errno
import socket

from tinygpt.errors import RequestError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens: who connects already waits.

    RequestError if the address is taken or is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise RequestError(f"--host {host} with --port {port} is no address: {error}.") from None
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen()  # two sockets may have one address until one of them listens
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise RequestError(
                f"--host {host} is no address of this machine: give 127.0.0.1, which this machine alone reaches, or "
                "0.0.0.0, which is all of its addresses."
            ) from None
        raise RequestError(
            f"{host}:{port} cannot be listened on ({error.strerror}): choose another --port, or end what has it."
        ) from None
    return found


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
