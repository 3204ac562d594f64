"""GatheringTransport: a connection's transport that can keep back parts of a reply, to hand them over as one."""

from asyncio import Transport
from typing import Any


class GatheringTransport:
    """An asyncio transport, but for what is written between `keep` and `flush`, or `close`."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._kept: list[bytes] = []
        self._is_keeping = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def keep(self) -> None:
        self._is_keeping = True

    def write(self, data: bytes) -> None:
        if self._is_keeping:
            self._kept.append(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write what was kept back, and keep nothing from now on."""
        self._is_keeping = False
        if self._kept:
            self._transport.write(b"".join(self._kept))
            self._kept.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()
