"""ASGI middleware: limits on the request body, and measurement of requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._most:
            await self._refuse(send, 413, f"the body must have at most {self._most:,} bytes, got {int(announced):,}")
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            await self._refuse(send, 408, f"the body did not arrive within {self._seconds:g} s")
            return
        if body is None:
            await self._refuse(send, 413, f"the body must have at most {self._most:,} bytes")
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._most:
                return None
            if not message.get("more_body", False):
                return bytes(body)

    async def _refuse(self, send: Send, status: int, text: str) -> None:
        content = json.dumps({"detail": text}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class Measured:
    """ASGI middleware that reports path, status and duration of every request.

    The path is that of the matched route, or ``"other"``. The duration ends when the response was sent.
    """

    def __init__(self, app: App, observe: Callable[[str, int, float], object]) -> None:
        self._app, self._observe = app, observe

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._observe(path, status, time.perf_counter() - started)
