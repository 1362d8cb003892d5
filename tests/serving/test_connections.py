"""Slow, endless and too many connections to the service; its port; its log; several workers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from recsys_topk.cli.main import main
from recsys_topk.cli.serve import make_worker
from recsys_topk.serving import connections
from recsys_topk.serving.connections import LimitedConnection
from recsys_topk.serving.service import ServiceOptions, make_app
from tests.serving.running import Running, serving


@contextmanager
def listening(export: Path, **options: Any) -> Iterator[Running]:
    """Run a service in a thread of this process."""
    app = make_app(export, options=ServiceOptions(watch=0, **options))
    server = uvicorn.Server(uvicorn.Config(app, http=LimitedConnection, ws="none", log_config=None, backlog=128))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        port = bound.getsockname()[1]
        thread.start()
        try:
            while not server.started:
                time.sleep(0.02)
            yield Running(None, port)  # type: ignore[arg-type]
        finally:
            server.should_exit = True
            thread.join()


def cut(service: Running, limit: str) -> float:
    """Return the number of connections that were cut by a limit."""
    name = f'recsys_topk_connections_cut_total{{limit="{limit}"}} '
    lines = service.call("/metrics")[1].splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_slow_heads_are_cut_and_other_clients_are_answered(sealed_export: Path) -> None:
    async def slow(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow:")
        try:
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()

    async def all_at_once(service: Running) -> list[bytes]:
        waiting = [asyncio.create_task(slow(service.port)) for _ in range(60)]
        assert (await asyncio.to_thread(service.call, "/health"))[0] == 200
        return await asyncio.gather(*waiting)

    with listening(sealed_export, header_seconds=1.0) as service:
        answers = asyncio.run(all_at_once(service))
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 408"}
        assert cut(service, "header-seconds") == 60


def test_endless_head_is_cut_after_its_limit(sealed_export: Path) -> None:
    with listening(sealed_export, header_bytes=4000) as service:
        for head in (b"X-Long: " + b"y" * 5000, b"X-Many: yy\r\n" * 500):
            with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
                assert client.send(head)
                assert client.recv(100).startswith(b"HTTP/1.1 431")
        assert cut(service, "header-bytes") == 2
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:  # many requests at once
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 300 + b"GET /health HTTP/1.1\r\n")
            received = b""
            while received.count(b"alive") < 300:
                received += client.recv(1 << 16)
        assert b"HTTP/1.1 431" not in received
        connection = service.connect()  # ordinary requests of one connection do not add up
        for _ in range(3):
            connection.request("GET", "/health", headers={"X-Half": "y" * 2500})
            assert connection.getresponse().read()
        connection.close()


def test_connections_beyond_the_limit_or_the_file_descriptors_get_503(
    sealed_export: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "free_descriptors", lambda: 43)
    with listening(sealed_export) as service:
        assert "at most 3 connections instead of 800: raise the limit of open files" in caplog.text
        opened = [socket.create_connection(("127.0.0.1", service.port), timeout=60) for _ in range(3)]
        assert service.call("/health")[0] == 503
        assert "connections cut since the last such line, the latest by --connections" in caplog.text
        for one in opened:
            one.close()
        for _ in range(100):
            if service.call("/health")[0] == 200:
                break
            time.sleep(0.05)
        assert cut(service, "connections") >= 1


def test_free_descriptors_are_those_that_can_be_opened() -> None:
    before = connections.free_descriptors()
    with socket.socket(), socket.socket():
        assert connections.free_descriptors() in (before - 2, float("inf"))


def test_port_in_use_is_one_line_and_the_documented_status(
    sealed_export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--export", str(sealed_export), "--port", str(port)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"recsys-topk serve: cannot listen on 127.0.0.1:{port} (")
    assert lines[-1].endswith("choose another --host or --port")
    assert main(["serve", "--export", str(sealed_export), "--port", "99999"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_access_log_has_the_ids_of_the_responses(sealed_export: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from starlette.testclient import TestClient

    ids = {}
    for kind in ("json", "on", "off"):
        with TestClient(make_app(sealed_export, options=ServiceOptions(watch=0, access_log=kind))) as client:
            ids[kind] = [
                client.get("/health", headers={"X-Request-ID": given}).headers["X-Request-ID"]
                for given in ("mine-1", "not\x1b[2Jmine")
            ]
        assert ids[kind][0] == "mine-1"
        assert ids[kind][1].isalnum()
        lines = capfd.readouterr().out.splitlines()
        assert len(lines) == (0 if kind == "off" else 2)
        if kind == "json":
            entries = [json.loads(line) for line in lines]
            assert [(one["request_id"], one["path"], one["status"]) for one in entries] == [
                (identity, "/health", 200) for identity in ids[kind]
            ]
        if kind == "on":
            assert [line.split()[1] for line in lines] == ids[kind]


def test_body_without_the_json_header_gets_an_error_that_names_it(sealed_export: Path) -> None:
    from starlette.testclient import TestClient

    with TestClient(make_app(sealed_export, options=ServiceOptions(watch=0))) as client:
        for kind in ({}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}):
            answer = client.post("/recommend", content=b'{"users": ["u1"]}', headers=kind)
            assert answer.status_code == 422
            assert "send the header 'Content-Type: application/json'" in answer.text


@pytest.mark.long
def test_workers_share_the_port_and_sum_their_metrics(sealed_export: Path) -> None:
    with serving(sealed_export, "--workers", "2", "--access-log", "json") as service:
        for _ in range(40):
            assert service.call("/recommend", {"users": ["u1"]})[0] == 200
        metrics = service.call("/metrics")[1]
        assert 'recsys_topk_requests_total{path="/recommend",status="200"} 40.0' in metrics
        for _ in range(600):
            found = service.call("/metrics")[1]
            if f'export="{service.call("/ready")[1]["export"]}"}} 2.0' in found:
                break
            time.sleep(0.1)
        else:
            pytest.fail("the second worker is not in the metrics")


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs ulimit")
def test_few_file_descriptors_shed_load_and_say_so(sealed_export: Path) -> None:
    command = [sys.executable, "-m", "recsys_topk", "serve", "--export", str(sealed_export), "--port", "0"]
    process = subprocess.Popen(["sh", "-c", 'ulimit -n 120; exec "$@"', "-", *command],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2].partition("/")[0])
    opened = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(300)]
    statuses = [one.recv(12) for one in opened[-100:]]
    for one in opened:
        one.close()
    process.terminate()
    errors = process.communicate(timeout=120)[1]
    assert set(statuses) == {b"HTTP/1.1 503"}
    assert "raise the limit of open files" in errors
    assert "the latest by --connections" in errors
    assert "Too many open files" not in errors


def test_log_of_the_service_has_no_attempts_of_faiss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At import faiss logs a ModuleNotFoundError for every set of CPU instructions that it was not built for."""
    monkeypatch.setattr("recsys_topk.serving.service.make_app", lambda *_: "app")
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.NOTSET, logger="faiss")
    assert make_worker() == "app"
    assert not logging.getLogger("faiss.loader").isEnabledFor(logging.INFO)
    assert logging.getLogger("faiss.loader").isEnabledFor(logging.WARNING)
