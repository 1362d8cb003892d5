"""Provenance of a result: command, versions, machine and time."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from recsys_topk import __version__

PACKAGES = (
    "recsys-topk", "python", "torch", "torchrec", "lightning", "torchmetrics", "numpy", "pyarrow", "wandb", "matplotlib"
)  # fmt: skip


def cpu_model() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def installed() -> dict[str, str]:
    """Return the versions of all installed distributions by name, with hyphens."""
    return {one.metadata["Name"].replace("_", "-").lower(): one.version for one in distributions()}


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Return what is needed to reproduce a result of a command line: command, versions, machine and time.

    Example:
        >>> sorted(provenance(["recsys-topk", "compare"]))
        ['command', 'machine', 'started', 'versions']
    """
    versions = {"recsys-topk": __version__, "python": platform.python_version(), **installed()}
    return {
        "command": list(command),
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.system()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
