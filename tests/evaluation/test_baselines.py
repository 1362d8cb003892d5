"""Baselines over the whole catalogue against loops and against `implicit` used directly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys_topk import CascadeModule, StageConfig
from recsys_topk.datamodules import InteractionsDataModule
from recsys_topk.evaluation import evaluate_baseline, evaluate_corpus
from recsys_topk.evaluation.baselines import Baseline, registry
from recsys_topk.evaluation.baselines.als import ALS
from recsys_topk.evaluation.baselines.ease import EASE
from recsys_topk.evaluation.baselines.itemknn import ItemKNN
from recsys_topk.evaluation.baselines.transitions import Transitions
from recsys_topk.evaluation.training_log import TrainingLog
from tests.evaluation.test_corpus import STAGES, Tiny, make_model

USERS, ITEMS, CUT = 40, 30, 6


def interactions() -> dict[int, list[int]]:
    """Return the items of each user in order, without repeats; neighbours of a ring follow each other often."""
    draw = np.random.default_rng(2)
    found = {}
    for user in range(USERS):
        steps = draw.integers(1, 8, 30)
        path = (draw.integers(ITEMS) + np.cumsum(steps)) % ITEMS
        found[user] = list(dict.fromkeys(path.tolist()))[: draw.integers(3, 18)]
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> InteractionsDataModule:
    rows = [(user, item, time) for user, items in interactions().items() for time, item in enumerate(items)]
    user, item, time = (list(column) for column in zip(*rows, strict=True))
    table = pa.table({"user": user, "item": item, "time": time})
    genre = pa.table({"item": list(range(ITEMS)), "genre": [i % 4 for i in range(ITEMS)]})
    folder = str(tmp_path_factory.mktemp("cache"))
    made = InteractionsDataModule(interactions=table, items=genre, split="leave_last", cache_dir=folder, batch_size=16)
    made.prepare_data()
    return made


def training_sequences(data: InteractionsDataModule) -> list[list[int]]:
    found = data.shard("train").sequences()
    assert found is not None
    sequences: list[list[int]] = [[] for _ in range(USERS)]
    for number, name in zip(found[0], data.item_names(found[1]), strict=True):
        sequences[number].append(int(name))
    return sequences


def test_sequences_and_earlier_items_are_those_of_the_source(data: InteractionsDataModule) -> None:
    assert sorted(training_sequences(data)) == sorted(items[:-2] for items in interactions().values())
    shard = data.shard("test")
    rows = np.arange(len(shard))
    earlier, users = shard.earlier(rows), shard.users(rows)
    assert earlier is not None
    assert users is not None
    ids = data.item_names(shard.catalogue().item_id.numpy()).astype(int)
    found = {int(user): ids[row[row >= 0]].tolist() for user, row in zip(users, earlier.numpy(), strict=True)}
    assert found == {user: items[:-1] for user, items in interactions().items()}


def transition_scores(history: list[int], gaps: int, newest: int, damping: float) -> list[float]:
    counts = np.zeros((ITEMS, ITEMS))
    for items in interactions().values():
        train = items[:-2]
        for a in range(len(train)):
            for b in range(a + 1, min(a + gaps + 1, len(train))):
                counts[train[a], train[b]] += 1 / (b - a)
    counts /= (1 + counts.sum(0)) ** damping
    return sum((counts[item] / (age + 1) for age, item in enumerate(history[::-1][:newest])), np.zeros(ITEMS)).tolist()


def expected_recall(scores: dict[int, list[float]]) -> dict[str, float]:
    """Return recall and NDCG of the last item among all items that the user had not, ties against it."""
    recalls, ndcgs = [], []
    for user, items in interactions().items():
        candidates = set(range(ITEMS)) - set(items[:-1])
        rank = sum(scores[user][item] >= scores[user][items[-1]] for item in candidates)
        recalls.append(rank <= CUT)
        ndcgs.append(1 / math.log2(1 + rank) if rank <= CUT else 0.0)
    return {f"recall@{CUT}": float(np.mean(recalls)), f"ndcg@{CUT}": float(np.mean(ndcgs))}


def expected_scores(name: str, data: InteractionsDataModule) -> dict[int, list[float]]:
    from implicit.cpu.als import AlternatingLeastSquares
    from implicit.nearest_neighbours import CosineRecommender
    from scipy.sparse import csr_matrix

    train, test = np.zeros((USERS, ITEMS), np.float32), np.zeros((USERS, ITEMS), np.float32)
    for user, items in interactions().items():
        train[user, items[:-2]], test[user, items[:-1]] = 1, 1
    if name == "popularity":
        return dict.fromkeys(range(USERS), train.sum(0).tolist())
    if name == "transitions":
        return {user: transition_scores(items[:-1], 3, 2, 0.5) for user, items in interactions().items()}
    if name == "itemknn":
        model = CosineRecommender(K=5, num_threads=1)
        model.fit(csr_matrix(train), show_progress=False)
        return dict(enumerate((test @ model.similarity.toarray()).tolist()))
    if name == "ease":  # one ridge regression per item on all other items
        weights = np.zeros((ITEMS, ITEMS))
        for item in range(ITEMS):
            rest = np.delete(train, item, 1).astype(float)
            solved = np.linalg.solve(rest.T @ rest + 3 * np.eye(ITEMS - 1), rest.T @ train[:, item])
            weights[:, item] = np.insert(solved, item, 0)
        return dict(enumerate((test @ weights).tolist()))
    model = AlternatingLeastSquares(4, regularization=0.5, alpha=2.0, iterations=3, random_state=1, num_threads=1)
    users = {tuple(items[:-2]): user for user, items in interactions().items()}
    order = [users[tuple(items)] for items in training_sequences(data)]  # the first factors depend on it
    model.fit(csr_matrix(train[order]), show_progress=False)
    factors = model.recalculate_user(np.arange(USERS), csr_matrix(test))
    return dict(enumerate((factors @ model.item_factors.T).tolist()))


BASELINES: dict[str, Any] = {
    "popularity": "popularity",
    "transitions": Transitions(gaps=3, newest=2, damping=0.5),
    "itemknn": ItemKNN(5, "cosine"),
    "als": ALS(4, 0.5, 2.0, 3, seed=1),
    "ease": EASE(3.0),
}


@pytest.mark.filterwarnings("ignore:Method expects CSR input", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BASELINES)
def test_baseline_equals_loop_over_users(
    name: str, data: InteractionsDataModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_topk.evaluation.baselines.base.PAIRS_AT_ONCE", 7 * ITEMS)
    found = evaluate_baseline(BASELINES[name], data, "test", cuts=[CUT])
    expected = expected_recall(expected_scores(name, data))
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert 0 < expected[f"recall@{CUT}"] < 1


def test_cascade_and_baselines_share_one_table_and_history_is_a_tuning_split(data: InteractionsDataModule) -> None:
    model = CascadeModule(
        data.schema, [StageConfig("two_tower", "only", CUT, {"hidden": [4]})], "softmax", k=CUT, dim=2
    )
    together = evaluate_corpus(model, data, "val", baselines=["popularity", Transitions()]).compute()
    alone = evaluate_baseline("transitions", data, k=CUT, cuts=[CUT])  # on val
    assert {f"{name}/transitions": value for name, value in alone.items()}.items() <= together.items()
    assert {name.split("/")[1] for name in together} == {"corpus", "popularity", "transitions", "random"}


def test_metrics_beyond_accuracy_and_slices_equal_loops(data: InteractionsDataModule) -> None:
    slices = ("new", "warm", "short", "long")
    found = evaluate_baseline(
        BASELINES["transitions"], data, "test", cuts=[CUT], slices=slices, short=8, diversity=["genre"]
    )
    scores = expected_scores("transitions", data)
    train = {user: items[:-2] for user, items in interactions().items()}
    count = [sum(item in items for items in train.values()) for item in range(ITEMS)]
    members: dict[str, list[int]] = {name: [] for name in ("", *slices)}
    lists = {}
    for user, items in interactions().items():
        candidates = sorted(set(range(ITEMS)) - set(items[:-1]))
        lists[user] = sorted(candidates, key=lambda i: (-np.float32(scores[user][i]), i == items[-1], i))[:CUT]
        for name in ("", "new" if count[items[-1]] == 0 else "warm", "short" if len(items) <= 9 else "long"):
            members[name].append(user)
    assert min(len(members[name]) for name in ("warm", "short", "long")) > 3
    for name, users in members.items():
        suffix = f"@{CUT}_{name}" if name else f"@{CUT}"
        if not users:
            assert f"recall{suffix}" not in found
            continue
        shown = [item for user in users for item in lists[user]]
        exposure = [shown.count(item) for item in range(ITEMS)]
        popular = np.mean([np.mean([count[i] for i in lists[user]]) for user in users])
        profile = np.mean([np.mean([count[i] for i in interactions()[user][:-1]]) for user in users])
        pairs = [[a % 4 != b % 4 for a in lists[user] for b in lists[user] if a != b] for user in users]
        expected = {
            "recall": np.mean([interactions()[user][-1] in lists[user] for user in users]),
            "coverage": np.mean([number > 0 for number in exposure]),
            "gini": sum(abs(a - b) for a in exposure for b in exposure) / (2 * ITEMS * sum(exposure)),
            "novelty": np.mean([np.mean([-math.log2(max(count[i], 1) / USERS) for i in lists[u]]) for u in users]),
            "popularity_lift": popular / profile - 1,
            "diversity_genre": np.mean([np.mean(pair) for pair in pairs]),
        }
        for metric, value in expected.items():
            assert found[f"{metric}{suffix}"] == pytest.approx(value, abs=1e-9), (metric, name)


def test_data_without_user_sequences_have_only_popularity() -> None:
    data = Tiny()
    model = make_model(data, STAGES["one stage"], exact=False)
    assert "recall@6/popularity" in evaluate_corpus(model, data, baselines=["popularity"]).compute()
    with pytest.raises(ValueError, match=r"'transitions' needs the users' training interactions.*popularity"):
        evaluate_corpus(model, data, baselines=["transitions"])


def test_ease_refuses_large_catalogues_and_a_wrong_option() -> None:
    with pytest.raises(ValueError, match=r"'ease' inverts a matrix of items x items: at most 30,000 items, got 30,001"):
        EASE().fit(TrainingLog(torch.ones(30_001)))
    with pytest.raises(ValueError, match=r"regularization must be above 0, got 0"):
        EASE(0)


def test_errors_name_the_option(data: InteractionsDataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown baseline 'alz'; did you mean 'als'"):
        evaluate_baseline("alz", data)
    with pytest.raises(ValueError, match="unknown slice 'shrt'; did you mean 'short'"):
        evaluate_baseline("popularity", data, slices=["shrt"])
    with pytest.raises(ValueError, match="unknown item feature 'gnre'; did you mean 'genre'"):
        evaluate_baseline("popularity", data, diversity=["gnre"])
    monkeypatch.setitem(__import__("sys").modules, "implicit.cpu.als", None)
    with pytest.raises(ImportError, match=r"needs implicit: pip install 'recsys-topk\[baselines\]'"):
        evaluate_baseline("als", data)


def test_registry_finds_all_baselines_and_accepts_a_new_one(data: InteractionsDataModule) -> None:
    assert set(registry.available()) >= {"popularity", "transitions", "itemknn", "als", "ease"}

    class LastItemAgain(Baseline):
        """No name, so it is not registered; used as an object."""

        name = "next_row"

        def fit(self, log: TrainingLog) -> None:
            self.size = log.items

        def scores(self, histories: torch.Tensor) -> torch.Tensor:
            last = histories.gather(1, (histories >= 0).sum(1, keepdim=True) - 1)
            return -((torch.arange(self.size) - last - 1) % self.size).float()

    found = evaluate_baseline(LastItemAgain(), data, "test", cuts=[CUT])
    del registry._classes["next_row"]
    assert found[f"recall@{CUT}"] > evaluate_baseline("popularity", data, "test", cuts=[CUT])[f"recall@{CUT}"]
