"""Fixtures that many tests share."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from recsys_topk.cli.main import main
from tests import warm_python as warm_python_server

for name in ("COLUMNS", "LINES"):  # the width of tables is the tests', not that of whoever starts them
    os.environ.pop(name, None)

Result = subprocess.CompletedProcess[str]

collect_ignore = ["fixtures"]  # files of older versions and of peers, and the scripts that made them

# A world that simulates in about a second and trains in a few steps.
TINY_WORLD = [
    "--data.world.users=40", "--data.world.items=300", "--data.world.days=4", "--data.world.requests=120",
    "--data.batch_size=60", "--data.eval_negatives=40", "--trainer.log_every_n_steps=1",
]  # fmt: skip


def long_except(names: Iterable[str], *quick: str) -> list[Any]:
    """Return the names as parameters of a test that `make test` runs only for the `quick` ones."""
    assert set(quick) <= set(names)
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.long) for name in names]


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all test processes share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def world_cache(session_folder: Path) -> Path:
    """A cache folder for the tests, so that no test uses the user's cache."""
    folder = session_folder / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def environment(world_cache: Path) -> dict[str, str]:
    """Environment variables without W&B settings and with an empty cache and home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "RECSYS_TOPK_CACHE": str(world_cache), "HOME": str(world_cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def warm_python(session_folder: Path) -> Iterator[list[str]]:
    """Python in a new process that has imported the heavy libraries."""
    if sys.platform != "linux":
        yield [sys.executable]
        return
    with FileLock(session_folder / "warm_python.lock"):
        command, lease = warm_python_server.start(hashlib.sha256(str(session_folder).encode()).hexdigest())
    with lease:
        yield command


@pytest.fixture
def recsys_topk(environment: dict[str, str], warm_python: list[str], tmp_path: Path) -> Callable[..., Result]:
    """Run the command in a new process and an empty folder, with no standard input."""

    def run(*arguments: str, folder: Path = tmp_path, timeout: float = 240.0) -> Result:
        return subprocess.run(
            [*warm_python, "-m", "recsys_topk", *arguments],
            capture_output=True, text=True, check=False, cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, timeout=timeout,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def in_process(environment: dict[str, str]) -> Callable[..., Result]:
    """Run the command like `recsys_topk`, but in this process."""

    def run(folder: Path, *arguments: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            for name, value in environment.items():
                patch.setenv(name, value)
            status = main(arguments)
        return subprocess.CompletedProcess(list(arguments), status, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def made_once(in_process: Callable[..., Result], session_folder: Path) -> Callable[..., Path]:
    """Return a function that runs a command once for all test processes and returns its folder.

    The output of the command is in stdout.txt. Tests that change files copy the folder first.
    """

    def make(name: str, *arguments: str, files: dict[str, str] | None = None) -> Path:
        folder = session_folder / name
        with FileLock(f"{folder}.lock"):
            if not (folder / "stdout.txt").is_file():
                folder.mkdir()
                for file, text in (files or {}).items():
                    (folder / file).write_text(text)
                done = in_process(folder, *arguments)
                assert done.returncode == 0, done.stderr
                (folder / "stdout.txt").write_text(done.stdout)
        return folder

    return make
