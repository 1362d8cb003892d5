"""Compiled loops on the threads of torch: every call runs once, with its own arguments, in the order of its chain."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from recsys_topk.ops.backends import parallel
from recsys_topk.ops.backends.jit import Floats, Integers, jit
from recsys_topk.ops.backends.parallel import Call, run_chains, run_parts, run_threads
from recsys_topk.ops.dispatch import installed
from tests.ops.forked import assert_ends_in_a_forked_process, needs_fork

needs_numba = pytest.mark.skipif(not installed("numba"), reason="the compiled loops need numba")


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "Python"])
def _team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(parallel, "_team", lambda: None)


@jit
def scale(row: int, factor: float, out: Floats, plus: float, by: Integers) -> None:
    for i in range(out.shape[1]):
        out[row, i] = out[row, i] * factor + plus * by[i]


@jit
def mark(part: int, first: int, last: int, seen: Integers) -> None:
    for i in range(first, last):
        seen[i] += part + 1


@needs_numba
@pytest.mark.usefixtures("_team")
@pytest.mark.parametrize("chains", [1, 2, 7])
def test_chains_are_run_once_and_in_order(chains: int) -> None:
    by, out = np.arange(5), np.ones((chains, 5), np.float32)
    expected = np.empty_like(out)
    made = []
    for row in range(chains):
        steps = [(np.float32(row + k), np.float32(k - 0.5)) for k in range(row)]
        made.append([Call(scale, (row, factor, out, plus, by)) for factor, plus in steps])
        values = np.ones(5)
        for factor, plus in steps:
            values = values * factor + plus * by
        expected[row] = values
    run_chains(made)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


@needs_numba
@pytest.mark.usefixtures("_team")
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_every_list_is_in_one_part(size: int, threads: int) -> None:
    seen = np.zeros(size, np.int64)
    run_parts(mark, size, seen)
    assert seen.tolist() == sorted(seen.tolist())
    assert set(seen.tolist()) == set(range(1, min(threads, size) + 1))


@needs_numba
def test_an_array_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arrays must be contiguous, got shape \(3,\) with strides \(16,\)"):
        run_parts(mark, 3, np.zeros(6, np.int64)[::2])


def test_python_threads_share_the_tasks(threads: int) -> None:
    if threads != 2:
        pytest.skip("for two threads")
    both = threading.Barrier(2, timeout=30)
    run_threads(lambda task: both.wait() if task else None, range(3))  # fails if one thread runs tasks 1 and 2


def test_an_error_in_a_thread_is_raised() -> None:
    def fail(task: int) -> None:
        if task == 2:
            raise KeyError("from a thread")

    with pytest.raises(KeyError, match="from a thread"):
        run_threads(fail, range(3))


@needs_numba
@needs_fork
def test_loops_run_in_a_forked_process() -> None:
    run_parts(mark, 8, np.zeros(8, np.int64))
    assert_ends_in_a_forked_process(_in_child)


def _in_child() -> None:
    seen = np.zeros(8, np.int64)
    run_parts(mark, 8, seen)
    assert seen.all()
