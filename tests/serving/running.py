"""A service in a process of its own, in which importing torch raises."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Nothing but what requirements/serve.lock installs may be imported: the names that training needs are refused.
BLOCK = """
import importlib.abc, sys
BLOCKED = {"torch", "lightning", "torchrec", "torchmetrics", "datasets", "pandas", "polars", "onnx", "onnxscript",
           "wandb", "jsonargparse", "numba", "scipy", "filelock", "fsspec", "matplotlib"}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Refuse())
from recsys_topk.cli.main import main
"""


class Running:
    """A service that listens.

    Args:
        process: Its process.
        port: Its port.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        connection = self.connect()
        with contextlib.closing(connection):
            content = raw if raw is not None else None if body is None else json.dumps(body).encode()
            method = "GET" if content is None else "POST"
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            kind = response.headers.get("Content-Type", "")
            return response.status, json.loads(text) if kind.startswith("application/json") else text.decode()


def run_blocked(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command of recsys-topk where torch cannot be imported."""
    code = f"{BLOCK}\nraise SystemExit(main({list(arguments)!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


@contextlib.contextmanager
def serving(export: Path, *options: str) -> Iterator[Running]:
    """Run a service; it is stopped in the end."""
    process = run_blocked("serve", "--export", str(export), "--port", "0", *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, process.stderr.read() if process.stderr is not None else ""
        yield Running(process, int(line.partition("127.0.0.1:")[2].partition("/")[0]))
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.communicate()
