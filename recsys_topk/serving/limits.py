"""ASGI middleware: limits on the request body; measurement, ids and the access log of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any

from recsys_topk.serving.funnel import ModelFaultError, first_line
from recsys_topk.text import printable

log = logging.getLogger(__name__)

ACCESS_LOGS = ("off", "on", "json")
_REQUEST_ID = re.compile(rb"[\w.:+/=@-]{1,128}")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class BodyLimits:
    """ASGI middleware that reads the whole body first, with limits on its size (413) and time (408)."""

    def __init__(self, app: App, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a connection."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self._seconds):
                while more and len(body) <= self._most:
                    message = await receive()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            return await refuse(send, 408, f"the body did not arrive within {self._seconds:g} s")
        if len(body) > self._most:
            return await refuse(send, 413, f"the body must have at most {self._most:,} bytes")
        whole = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        return await self._app(scope, replay, send)


async def refuse(send: Send, status: int, text: str, **more: str) -> None:
    """Send an error and close the connection."""
    content = json.dumps({"detail": text, **more}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(content)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class Measured:
    """ASGI middleware that reports path, status and duration of every request, and gives each request an id.

    The path is that of the matched route, or ``"other"``. The duration ends when the response was sent. The id is that
    of the header X-Request-ID, or a new one; the application finds it in ``scope["state"]["request_id"]``, and every
    response has it. An exception of the application becomes a response with the status 500 and the id.
    """

    def __init__(self, app: App, observe: Callable[[str, int, float], object], access: str = "off") -> None:
        self._app, self._observe, self._access = app, observe, access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        identity = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            traceback = not isinstance(error, ModelFaultError)
            log.error("request %s failed: %s", identity, printable(first_line(error)), exc_info=traceback)
            if status:  # the response has begun, so its connection must be closed
                raise
            await refuse(watched, 500, "the service failed; its log has the reason", request_id=identity)
        finally:
            seconds = time.perf_counter() - started
            self._observe(getattr(scope.get("route"), "path", "other"), status or 500, seconds)
            if self._access != "off":
                self._write(scope, identity, status or 500, seconds)

    def _write(self, scope: MutableMapping[str, Any], identity: str, status: int, seconds: float) -> None:
        entry: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "request_id": identity}
        entry |= {"client": (scope.get("client") or ["-"])[0], "method": scope["method"]}
        entry |= {"path": printable(scope["path"]), "status": status, "seconds": round(seconds, 6)}
        line = json.dumps(entry) if self._access == "json" else " ".join(map(str, entry.values()))
        with contextlib.suppress(OSError, ValueError):  # the reader of the log is gone
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
