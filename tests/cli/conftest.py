"""The commands that train many runs, in the process of the tests: their runs then share one set of imports."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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
