"""Attribute filters against a loop over the raw attributes, with exact search, faiss and a vector store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_topk.cli.main import main
from recsys_topk.serving import index
from recsys_topk.serving.manifest import ManifestError
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.vector_store import build_store
from tests.serving.films import GENRES, LANGUAGE, NAMES, QUOTAS, raw_request

WHERE: list[dict[str, Any]] = [
    {"genre": ["comedy"]},
    {"genre": ["comedy", "war"], "language": ["en", "ja"]},
    {"language": ["fr"], "genre": ["horror"], "item_id": NAMES[::2]},
    {"genre": ["no such genre"]},
]


def passes(film: int, where: dict[str, Any]) -> bool:
    own = {"genre": GENRES[film], "language": [LANGUAGE[film]], "item_id": [NAMES[film]]}
    return all(set(own[name]) & set(values) for name, values in where.items())


@pytest.fixture(scope="module")
def exact(films: Path) -> CascadeRecommender:
    return CascadeRecommender.from_export(films)


@pytest.mark.parametrize("place", ["exact", "flat", "ivf", "hnsw", "qdrant memory", "qdrant folder"])
def test_filtered_first_stage_is_the_best_of_the_films_that_pass(
    films: Path, exact: CascadeRecommender, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"flat": "flat", "ivf": "ivf", "hnsw": "hnsw"}
    where: Any = None if place == "exact" else tmp_path / "index"
    if place in kinds:
        index.build_index(films, where, place, effort=3)  # type: ignore[arg-type]
    elif place != "exact":
        where = "qdrant://:memory:/films" if place == "qdrant memory" else f"qdrant://{tmp_path}/store/films"
        assert build_store(films, where).recall == 1.0
    recommender = CascadeRecommender.from_export(films, where)
    users = [raw_request(number) for number in range(6)]
    queries = exact.funnel.first.request_vectors(exact.requests(users))
    scores = queries @ np.stack([exact.funnel.first.item_vectors(exact.items, [row])[0] for row in range(len(NAMES))]).T
    for wanted in WHERE:
        found = recommender.passages(users, where=wanted)
        for own, stages in zip(scores, found, strict=True):
            passing = [row for row in np.argsort(-own, kind="stable").tolist() if passes(row, wanted)]
            assert stages[0].rows.tolist() == passing[: QUOTAS[0]]
            assert stages[0].scores == pytest.approx(own[passing[: QUOTAS[0]]], rel=1e-4, abs=1e-5)
    blocked = [NAMES[row] for row in passing[:3]] + NAMES[:4]
    both = recommender.recommend(users, 10, where=WHERE[0], blocked=blocked, allowed=NAMES[:100])
    assert all(passes(NAMES.index(one.item), WHERE[0]) for own in both for one in own)
    assert not {one.item for own in both for one in own} & {*blocked, *NAMES[100:]}
    # A large filter is left to the graph or the lists of an approximate index: never an item that does not pass.
    monkeypatch.setattr(index, "_FEW_ITEMS", 0)
    large = recommender.passages(users, where=WHERE[0])
    assert all(passes(row, WHERE[0]) for stages in large for row in stages[0].rows.tolist())
    assert min(len(stages[0].rows) for stages in large) > 5


def test_filters_that_cannot_be_exact_are_refused(exact: CascadeRecommender) -> None:
    for where, text in (({"genr": ["x"]}, "Did you mean|did you mean|genre"), ({"age": [3]}, "items have: item_id")):
        with pytest.raises(ValueError, match=text):
            exact.recommend([{}], where=where)


def test_commands_write_a_store_and_filter(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"qdrant://{tmp_path}/store/films"
    assert main(["index", "--export", str(films), "--store", store]) == 0
    assert "150 items, flat, recall 1.0000" in capsys.readouterr().out
    assert main(["index", "--export", str(films), "--store", store]) != 0
    assert "already has the collection" in capsys.readouterr().err
    ask = ["recommend", "--export", str(films), "--index", store, "--user", "user 3", "--where", "genre=war"]
    assert main(ask) == 0
    shown = [one["item"] for one in json.loads(capsys.readouterr().out)["items"]]
    assert len(shown) == 5
    assert all("war" in GENRES[NAMES.index(name)] for name in shown)
    with pytest.raises(ManifestError, match="has 0 of the 150 items"):
        CascadeRecommender.from_export(films, "qdrant://:memory:/other")
    for wrong in ("qdrant://films", "qdrant:///films"):
        with pytest.raises(ValueError, match="HOST"):
            build_store(films, wrong)
