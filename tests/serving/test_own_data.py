"""An export of the user's own data keeps original user and item names, and takes requests with raw features."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.datamodules.interactions.datamodule import InteractionsDataModule
from recsys_topk.serving.export import export_cascade
from recsys_topk.serving.recommend import CascadeRecommender

DRAW = np.random.default_rng(3)
USERS = pd.DataFrame({"user": ["ann", "bob", "eve"], "age": [31.0, 44.0, 25.0]})
EVENTS = pd.DataFrame(
    {"user": DRAW.choice(USERS.user, 150), "item": [f"film {n}" for n in DRAW.integers(0, 30, 150)], "time": range(150)}
)


@pytest.fixture(scope="module")
def recommender(tmp_path_factory: pytest.TempPathFactory) -> CascadeRecommender:
    folder = tmp_path_factory.mktemp("own")
    features = {
        "user": {"user": {"kind": "categorical"}, "age": {"kind": "numeric"}},
        "items": {"item": {"kind": "categorical"}},
        "history": ["item"],
    }
    data = InteractionsDataModule(
        interactions=EVENTS, users=USERS, features=features, history_length=6, eval_negatives=5, cache_dir=str(folder)
    )
    stages = [{"kind": "two_tower", "name": "only", "quota": 8}]
    model = CascadeModule(loss="softmax", schema=data.schema, stages=stages, k=5)
    export_cascade(model, data, folder / "export", programs=False)
    return CascadeRecommender.from_export(folder / "export")


def test_user_by_name_and_user_by_features_get_the_same_items(recommender: CascadeRecommender) -> None:
    for row in USERS.itertuples():
        history = EVENTS[EVENTS.user == row.user].item.tolist()
        raw = {"user": row.user, "age": row.age, "history": history}
        for options in ({}, {"exclude_seen": True}):
            named, given = recommender.recommend([row.user], **options), recommender.recommend([raw], **options)
            assert [one.item for one in named[0]] == [one.item for one in given[0]]
            assert named[0][0].scores == pytest.approx(given[0][0].scores)
        left = {one.item for one in recommender.recommend([row.user], 8, exclude_seen=True)[0]}
        assert not left & set(history)
        assert left <= set(EVENTS.item)


def test_unknown_user_gets_recommendations(recommender: CascadeRecommender) -> None:
    assert len(recommender.recommend([{"user": "zoe", "age": None, "history": ["film 3", "no such film"]}])[0]) == 5
    assert len(recommender.recommend([{"history": []}])[0]) == 5
