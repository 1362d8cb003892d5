"""Freed memory is kept: read off the kernel's count of page faults, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, sys
import torch
from recsys_topk.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.set_num_threads(1)
def work():
    for _ in range(5):
        kept = [torch.ones(n * 250_000) for n in (5, 10, 20, 21, 22, 23, 24)]  # 5 to 24 MB, freed together
        del kept
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is set only on Linux")
def test_kept_memory_is_not_faulted_in_again() -> None:
    faults = {
        form: int(
            subprocess.run([sys.executable, "-c", PROBE, form], capture_output=True, text=True, check=True).stdout
        )
        for form in ("keep", "plain")
    }
    assert 10 * faults["keep"] < faults["plain"], faults
