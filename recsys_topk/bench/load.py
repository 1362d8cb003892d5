"""A load test of a local service, with keep-alive connections that send one request after another."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"


@dataclass
class Load:
    """The result of a load test."""

    seconds: float  # seconds from the first request to the last response
    latencies: list[float]  # seconds per response
    errors: int  # number of responses with a status other than 200
    exports: set[str]  # the exports that answered
    cpu: float | None = None  # CPU seconds of the service during the test; None if unknown

    @property
    def rate(self) -> float:
        """Responses per second."""
        return len(self.latencies) / self.seconds

    def percentile(self, share: float) -> float:
        """Return a percentile of the latencies in milliseconds."""
        return float(np.percentile(self.latencies, share)) * 1000


@dataclass(frozen=True)
class Service:
    """A service in a separate process."""

    port: int  # port on the loopback interface
    pid: int

    def cpu(self) -> float | None:
        """Return the CPU seconds that the service has used; None if there is no /proc."""
        path = Path(f"/proc/{self.pid}/stat")
        if not path.is_file():
            return None
        fields = path.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def put_load(
    service: Service,
    users: int,
    concurrency: int,
    requests: int,
    seconds: float,
    meanwhile: Callable[[], Awaitable[object]] | None = None,
) -> Load:
    """Send requests for the users 0 to users - 1 over several connections, up to a number of requests or seconds.

    The task `meanwhile` runs at the same time. The test lasts until it is done, but at most `seconds`.
    """
    before = service.cpu()
    found = asyncio.run(_put_load(service.port, users, concurrency, requests, seconds, meanwhile))
    after = service.cpu()
    found.cpu = None if before is None or after is None else after - before
    return found


async def _put_load(
    port: int, users: int, concurrency: int, requests: int, seconds: float, meanwhile: Any | None
) -> Load:
    latencies: list[float] = []
    exports: set[str] = set()
    errors = asked = 0
    started = time.perf_counter()
    other = None if meanwhile is None else asyncio.create_task(meanwhile())

    def done() -> bool:
        enough = asked >= requests and (other is None or other.done())
        return enough or time.perf_counter() - started > seconds

    async def ask() -> None:
        nonlocal asked, errors
        reader, writer = await asyncio.open_connection(HOST, port)
        while not done():
            body = json.dumps({"users": [asked % users]}).encode()
            asked += 1
            began = time.perf_counter()
            writer.write(
                b"POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
                + str(len(body)).encode() + b"\r\n\r\n" + body
            )  # fmt: skip
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            answer = await reader.readexactly(length)
            latencies.append(time.perf_counter() - began)
            errors += head.split(b" ", 2)[1] != b"200"
            exports.add(answer.partition(b'"export": "')[2].partition(b'"')[0].decode())
        writer.close()

    await asyncio.gather(*(ask() for _ in range(concurrency)))
    found = Load(time.perf_counter() - started, latencies, errors, exports)
    if other is not None:
        await other
    return found


async def wait_for_export(service: Service, identity: str, seconds: float) -> None:
    """Wait until a service uses the given export, at most the given seconds."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        reader, writer = await asyncio.open_connection(HOST, service.port)
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if identity.encode() in answer:
            return
        await asyncio.sleep(0.1)


@contextmanager
def running_service(export: Path, index: Path | None) -> Iterator[Service]:
    """Run a service in a separate process inside this context."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(str(export), None if index is None else str(index), there))
    process.start()
    try:
        if not here.poll(300):
            raise RuntimeError("the service did not start within 300 s")
        yield Service(int(here.recv()), int(process.pid or 0))
    finally:
        process.terminate()
        process.join(30)
        process.kill()


def _serve(export: str, index: str | None, port: Any) -> None:
    import socket

    import uvicorn

    from recsys_topk.serving.service import ServiceOptions, make_app

    app = make_app(export, index, ServiceOptions(watch=0.2, timeout=60.0))
    listening = socket.create_server((HOST, 0), backlog=2048)
    port.send(listening.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run([listening])
