"""Runs commands and services in a new process that can import only the packages of requirements/serve.lock."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[2] / "requirements" / "serve.lock"


def not_locked() -> set[str]:
    """Return the installed modules that are not in requirements/serve.lock, such as torch."""
    locked = {_normalised(name) for name in re.findall(r"^([A-Za-z0-9_.-]+)==", LOCK.read_text(), re.MULTILINE)}
    owners = {module: {_normalised(name) for name in names} for module, names in packages_distributions().items()}
    found = {module for module, names in owners.items() if not names & {*locked, "recsys-topk"}}
    assert {"torch", "lightning", "datasets", "onnx"} <= found
    return found


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# Blocks the import of all modules that the lock does not install.
BLOCK = f"""
import importlib.abc, sys
BLOCKED = {sorted(not_locked())!r}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}: blocked in this test", name=name)

sys.meta_path.insert(0, Refuse())
from recsys_topk.cli.main import main
"""


class Running:
    """A running service.

    Args:
        process: The process of the service.
        port: The port on which it listens.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    @property
    def url(self) -> str:
        """The address of the service."""
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        """Send a request; return the status and the JSON of the response."""
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
    """Start a command of recsys-topk in a process that cannot import torch."""
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
    """Run a service, and stop it at the end."""
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
