"""Fixtures that many tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Result = subprocess.CompletedProcess[str]

# A world that simulates in about a second and trains in a few steps.
TINY_WORLD = [
    "--data.world.users=40", "--data.world.items=300", "--data.world.days=4", "--data.world.requests=120",
    "--data.batch_size=60", "--data.eval_negatives=40", "--trainer.log_every_n_steps=1",
]  # fmt: skip


@pytest.fixture(scope="session")
def world_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the tests' own, so that no test sees or fills the user's."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def environment(world_cache: Path) -> dict[str, str]:
    """The environment of a user with no W&B account, no network and no cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "RECSYS_TOPK_CACHE": str(world_cache), "HOME": str(world_cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def recsys_topk(environment: dict[str, str], tmp_path: Path) -> Callable[..., Result]:
    """Run the real command in a folder of its own, with nothing to answer a prompt."""

    def run(*arguments: str, folder: Path = tmp_path, timeout: float = 240.0) -> Result:
        return subprocess.run(
            [sys.executable, "-m", "recsys_topk", *arguments],
            capture_output=True, text=True, check=False, cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, timeout=timeout,
        )  # fmt: skip

    return run
