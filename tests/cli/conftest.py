"""The commands that train many runs, in the process of the tests: their runs then share one set of imports."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from recsys_topk.cli.main import main
from tests.conftest import Result


@pytest.fixture(scope="session")
def in_process(environment: dict[str, str]) -> Callable[..., Result]:
    """Run a command as `recsys_topk` does, but without a new interpreter."""

    def run(folder: Path, *arguments: str) -> Result:
        said, complained = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(complained),
        ):
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            for name, value in environment.items():
                patch.setenv(name, value)
            status = main(arguments)
        return subprocess.CompletedProcess(list(arguments), status, said.getvalue(), complained.getvalue())

    return run


@pytest.fixture(scope="session")
def made_once(
    in_process: Callable[..., Result], tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[..., Path]:
    """Return a folder in which a command has run, once for all processes of the tests; what it said is in stdout.txt.

    Tests that change something copy it first.
    """
    base = tmp_path_factory.getbasetemp()

    def make(name: str, *arguments: str, files: dict[str, str] | None = None) -> Path:
        folder = (base if worker_id == "master" else base.parent) / name
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
