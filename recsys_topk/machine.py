"""The memory of this machine, and what may be planned for. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MEMORY_SHARE: Final = 0.9
"""Share of the memory of the machine that may be planned for; the remainder is for everything else."""


def machine_memory() -> int | None:
    """Return the bytes of memory available to this process: of the machine, or the limit of its control group."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        line = next((line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:")), None)
        if line is not None:
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def check_budget(size: int, what: str, advice: str) -> None:
    """Raise if something needs more than nine tenths of the memory of this machine (`machine_memory`).

    Args:
        size: The bytes that it needs.
        what: Its name in the message.
        advice: What to change.

    Example:
        >>> check_budget(2**60, "the batch", "use a smaller one")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the batch needs 1,073,741,824.0 GB, but the machine has ... GB; use a smaller one
    """
    available = machine_memory()
    if available is not None and size > MEMORY_SHARE * available:
        raise ValueError(
            f"{what} needs {size / 2**30:,.1f} GB, but the machine has {available / 2**30:,.1f} GB; {advice}"
        )
