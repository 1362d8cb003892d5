"""Commands and services in a process of their own, in which only what requirements/serve.lock installs is found."""

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
    """Return the installed modules that requirements/serve.lock does not install, torch among them."""
    locked = {_plain(name) for name in re.findall(r"^([A-Za-z0-9_.-]+)==", LOCK.read_text(), re.MULTILINE)}
    owners = {module: {_plain(name) for name in names} for module, names in packages_distributions().items()}
    found = {module for module, names in owners.items() if not names & {*locked, "recsys-topk"}}
    assert {"torch", "lightning", "datasets", "onnx"} <= found
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# As where the lock alone is installed: other modules cannot be imported.
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
