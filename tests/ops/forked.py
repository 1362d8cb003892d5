"""Run a function in a forked process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system cannot fork")


def assert_ends_in_a_forked_process(function: Callable[[], None]) -> None:
    """Fail if the function raises in a forked process, or does not end there within a minute."""
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    child.join(60)
    waiting = child.is_alive()
    child.kill()
    assert not waiting
    assert child.exitcode == 0
