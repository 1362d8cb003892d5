"""Starts the processes of a distributed test, once for all cases, and stops them all at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environments(processes: int) -> list[dict[str, str]]:
    """Return the environment per process as torchrun sets it, with all traffic on the loopback device."""
    shared = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def launch(
    python: list[str], module: str, processes: int, folder: Path, timeout: float, *arguments: str
) -> list[dict[str, Any]]:
    """Run ``python -m module FOLDER ARGUMENTS`` in several processes; return the content of each ``RANK.json``."""
    logs = [(folder / f"{rank}.log").open("w") for rank in range(processes)]
    command = [*python, "-m", module, str(folder), *arguments]
    started = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        for environment, log in zip(environments(processes), logs, strict=True)
    ]
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() not in (None, 0) for process in started):
                break
            time.sleep(0.05)
    finally:
        stop(started)
        for log in logs:
            log.close()
    texts = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(processes)]
    failed = [f"--- rank {rank}\n{texts[rank]}" for rank, process in enumerate(started) if process.returncode]
    assert not failed, "\n".join(failed)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def stop(started: list[subprocess.Popen[Any]]) -> None:
    """Kill the processes that still run, with their children."""
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        process.wait()
