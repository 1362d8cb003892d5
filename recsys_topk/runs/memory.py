"""How this process handles memory that it frees."""

from __future__ import annotations

import ctypes
import sys

# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks of up to 32 MB for the next step instead of returning them to the system.

    A training step frees and takes again the same few hundred megabytes. Returned and taken anew, every page of them
    is zeroed by the kernel again. Peak memory stays what it was; what is kept between steps is given back at the end of
    the process. Does nothing where there is no glibc.

    Returns:
        Whether it was set.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 * 2**20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
