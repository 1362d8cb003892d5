from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hand_made import SMALL, HandMade

from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.simulator.simulation import simulate


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the files of the tests out of the user's cache."""
    monkeypatch.setenv("RECSYS_TOPK_CACHE", str(tmp_path_factory.getbasetemp() / "cache-home"))


@pytest.fixture(scope="session")
def world_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("world") / "small", SMALL)


@pytest.fixture(scope="session")
def day_cache(world_root: Path, tmp_path_factory: pytest.TempPathFactory) -> DayCache:
    files = RecFlowFiles(world_root)
    cache = DayCache(files, tmp_path_factory.mktemp("prepared"))
    cache.prepare(files.days)
    return cache


@pytest.fixture
def hand_made(tmp_path: Path) -> HandMade:
    """Two requests: one with full groups, one with short groups."""
    made = HandMade(tmp_path / "hand")
    made.request(
        500,
        3,
        {
            "realshow": [1, 2],
            "rerank_pos": [4, 3, 2, 1],
            "rerank_neg": [5],
            "rank_pos": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            "rank_neg": list(range(20, 30)),
            "coarse_neg": list(range(30, 40)),
            "prerank_neg": list(range(40, 50)),
        },
        history=[60, 61, 62],
    )
    made.request(501, 4, {"rank_pos": [11, 2], "rank_neg": [21], "coarse_neg": [31], "prerank_neg": [99]})
    return made


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[HandMade], Any]:
    def prepare(made: HandMade) -> Any:
        files = made.write()
        cache = DayCache(files, tmp_path / "prepared")
        cache.prepare(files.days)
        return cache.open(files.days[0])

    return prepare
