"""Freed memory stays in the heap, by the statistics of the C library in a new process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROBE = """
import ctypes, sys
from recsys_topk.runs.libraries import keep_freed_memory

libc = ctypes.CDLL(None)
NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
MallInfo = type("MallInfo", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in NAMES]})
libc.mallinfo2.restype = MallInfo
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = libc.mallinfo2()
blocks = [libc.malloc(20 * 2**20) for _ in range(4)]
during = libc.mallinfo2()
for block in blocks:
    libc.free(block)
after = libc.mallinfo2()
print((during.hblkhd - before.hblkhd) // 2**20, (after.arena - before.arena) // 2**20)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="needs Linux and mallinfo2 (glibc 2.33)",
)
@pytest.mark.parametrize(("form", "mapped", "kept"), [("keep", 0, 80), ("plain", 80, 0)])
def test_freed_blocks_of_20_mb_stay_in_the_heap(form: str, mapped: int, kept: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, form], capture_output=True, text=True, check=True)
    found = [int(number) for number in done.stdout.split()]
    assert found == pytest.approx([mapped, kept], abs=1)
