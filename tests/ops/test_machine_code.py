"""Machine code is stored on disk, built again if it is damaged, and loaded without numba."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys_topk import losses
from recsys_topk.ops import stages
from recsys_topk.ops.backends import machine_code
from recsys_topk.ops.backends.jit import Integers, jit
from recsys_topk.ops.backends.parallel import run_parts
from recsys_topk.ops.dispatch import installed

pytestmark = pytest.mark.skipif(not installed("numba"), reason="the compiled loops need numba")


def double(part: int, first: int, last: int, x: Integers) -> None:
    for i in range(first, last):
        x[i] *= 2


def call(loop: jit) -> None:
    x = np.arange(4)
    run_parts(loop, 4, x)
    assert x.tolist() == [0, 2, 4, 6]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run_parts(jit(double), 0, np.arange(0))  # compile what all loops share
    monkeypatch.setattr(machine_code, "_folders", lambda: iter([tmp_path / "not" / "there"]))
    return tmp_path / "not" / "there"


def test_loop_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(jit(double))
    assert len(list(folder.iterdir())) == 1
    monkeypatch.delattr(jit, "_dispatcher")
    call(jit(double))


def test_changed_source_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(jit(double))
    monkeypatch.setattr(machine_code, "fingerprint", lambda: "another")
    call(jit(double))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:400] + b"!" + b[401:]])
def test_damaged_file_is_built_again(folder: Path, damage, monkeypatch: pytest.MonkeyPatch) -> None:
    call(jit(double))
    (file,) = folder.iterdir()
    complete = file.read_bytes()
    file.write_bytes(damage(complete))
    call(jit(double))
    assert list(folder.iterdir()) == [file]
    monkeypatch.delattr(jit, "_dispatcher")
    call(jit(double))


def test_without_a_writable_folder_loops_are_compiled_and_one_warning_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.write_text("a file, not a folder")
    machine_code._warn_not_stored.cache_clear()
    with pytest.warns(UserWarning, match="cannot be stored.*not/there.*Set NUMBA_CACHE_DIR") as caught:
        [call(jit(double)) for _ in range(2)]
    assert len(caught) == 1


def test_folders_are_the_chosen_one_the_package_and_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    package = Path(machine_code.__file__).parent / "__pycache__"
    assert list(machine_code._folders()) == [Path("/chosen"), package, Path("/cache/recsys_topk/machine_code")]


CODE = """
import sys, torch
from recsys_topk import losses
for name in sys.argv[1:]:
    losses.get(name, k=2)(torch.arange(8.0).view(2, 4).requires_grad_(), torch.eye(4)[:2]).backward()
print(sorted({"numba", "scipy", "torch._dynamo", "torch._inductor", "triton"} & set(sys.modules)))
"""


def test_import_and_first_call_do_not_import_what_takes_seconds() -> None:
    """Numba compiles, which the loop below does in this process."""
    names = ["dftopk", "lambdarank", "listnet"]
    for name in names:
        losses.get(name, k=2)(torch.arange(8.0).view(2, 4).requires_grad_(), torch.eye(4)[:2])
    done = subprocess.run(
        [sys.executable, "-c", CODE, *names], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.stdout == "[]\n", done.stderr


def test_loops_allocate_no_memory() -> None:
    """In a process without numba there is no allocator that a loop could call."""
    found = set()
    for module in pkgutil.walk_packages(stages.__path__, "recsys_topk.ops.stages."):
        for loop in vars(importlib.import_module(module.name)).values():
            if isinstance(loop, jit):
                code = ast.walk(ast.parse(inspect.getsource(loop.function)))
                called = {node.func.attr for node in code if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
                assert not called & {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "copy"}, loop.path
                found.add(loop.path)
    assert len(found) > 5
