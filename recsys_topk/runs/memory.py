"""Memory that the process frees is kept for the next training step."""

from __future__ import annotations

import ctypes
import sys

# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks of up to 32 MB; return whether it accepted the setting.

    A training step frees and allocates the same few hundred megabytes. If they are returned to the system, the kernel
    zeroes every page again. Peak memory does not change. Without glibc this has no effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 * 2**20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
