"""Limits on connections: their number, and the size and the arrival time of the head of each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

log = logging.getLogger(__name__)

_RESERVE: Final = 40  # file descriptors for a reload, the logs and a burst of new connections
_LOG_EVERY: Final = 10.0


class ConnectionLimits:
    """Limits of one process: open connections, and seconds and bytes of the head of a request.

    Fewer connections are allowed if not enough files can be opened. `count` is called with the name of the limit for
    each connection that is cut.
    """

    STATE = "connection_limits"  # its key in the state of the application, which uvicorn passes to each connection

    def __init__(self, connections: int, seconds: float, size: int, count: Callable[[str], object]) -> None:
        self.connections, self.seconds, self.size, self._count = connections, seconds, size, count
        self._cut, self._logged = 0, 0.0
        files = free_descriptors() - _RESERVE
        if files < connections:
            self.connections = max(1, int(files))
            log.warning("at most %d connections instead of %d: raise the limit of open files (ulimit -n)",
                        self.connections, connections)  # fmt: skip

    def cut(self, limit: str) -> None:
        """Count a connection that is cut. Log the number from time to time."""
        self._count(limit)
        self._cut += 1
        if time.monotonic() - self._logged >= _LOG_EVERY:
            log.warning("%d connections cut since the last such line, the latest by --%s", self._cut, limit)
            self._cut, self._logged = 0, time.monotonic()


class LimitedConnection(HttpToolsProtocol):
    """A connection of uvicorn that is cut when one of the `ConnectionLimits` is exceeded.

    uvicorn limits neither the size nor the time of a head that httptools reads, and its `limit_concurrency` answers
    only after a head has arrived.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits: ConnectionLimits = self.app_state[ConnectionLimits.STATE]
        self._head_bytes: int | None = None  # of the head that is being read
        self._heads = 0  # that were read
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a head, or refuse the connection."""
        super().connection_made(transport)
        self._begin_head()
        if len(self.connections) > self._limits.connections:
            self._refuse(503, "connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait for a head."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a body, or a head that is small enough."""
        if self._head_bytes is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        room = len(data) if self._head_bytes is None else self._limits.size - self._head_bytes
        for part in (data[:room], data[room:]):
            if part and self._head_bytes is not None and self._head_bytes >= self._limits.size:
                self._refuse(431, "header-bytes")
            if part and not self.transport.is_closing():
                heads = self._heads
                super().data_received(part)
                if self._head_bytes is not None and self._heads == heads:
                    self._head_bytes += len(part)

    def on_message_begin(self) -> None:
        """Start to read a head."""
        self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Hand the request to the application."""
        self._heads += 1
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        if self._head_bytes is None:
            self._head_bytes = 0
            self._timer = self.loop.call_later(self._limits.seconds, self._late)

    def _end_head(self) -> None:
        self._head_bytes = None
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(408, "header-seconds")
        else:  # reading waits for the response to the request before it
            self._timer = self.loop.call_later(self._limits.seconds, self._late)

    def _refuse(self, status: int, limit: str) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self._limits.cut(limit)
            text = f"exceeds --{limit} of the service\n".encode()
            head = f"content-type: text/plain\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + text)
            self.transport.close()


def free_descriptors() -> float:
    """Return the number of files that the process may still open; infinity if it is not known."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return float("inf") if limit < 0 else limit - len(list(Path("/proc/self/fd").iterdir()))
    except (ImportError, OSError):
        return float("inf")
