"""Resident memory as Linux reports it."""

from __future__ import annotations

from pathlib import Path


def resident(field: str) -> float | None:
    """Return a resident size of this program in MB: ``"VmRSS"`` (now) or ``"VmHWM"`` (peak); None where not known.

    `getrusage` would count what the process was before it became this program, a copy of its parent.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024
