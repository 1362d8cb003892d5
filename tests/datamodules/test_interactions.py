"""Interactions against a loop over adversarial data without leakage; splits, features, invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys_topk.cli.main import main
from recsys_topk.datamodules.interactions import preparation
from recsys_topk.datamodules.interactions.datamodule import InteractionsDataModule
from recsys_topk.datamodules.interactions.guess import guess_files
from recsys_topk.serving.requests import EncodedRequests
from recsys_topk.tabular.ids.keys import id_keys
from recsys_topk.testing import check_data_module
from recsys_topk.testing.host_reads import DEVICE, no_host_reads

SPLITS = ("train", "val", "test")


def adversarial(seed: int, rows: int = 400) -> pd.DataFrame:
    """Return shuffled rows of few users, items and times: many ties, repeats, exact duplicates, and missing values."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "user": draw.choice(["ann", "bob", "7", "eve"], rows, p=[0.6, 0.2, 0.15, 0.05]),
            "item": draw.integers(0, 40, rows),
            "time": draw.integers(0, 60, rows),
            "weight": draw.integers(1, 4, rows).astype(float),
            "split": draw.choice(SPLITS, rows, p=[0.6, 0.2, 0.2]),
            "rating": draw.integers(1, 6, rows).astype(float),
        }
    )
    return pd.concat([frame, frame.sample(50, random_state=seed)]).sample(frac=1, random_state=seed)


def device_of(item: int, time: int) -> str:
    return ("tv", "phone", "web")[(item + time) % 3]


def with_missing(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, and copies of some of them that lack the user, the item, the time, the weight or the rating."""
    lacking = []
    for number, name in enumerate(("user", "item", "time", "weight", "rating")):
        rows = frame.sample(9, random_state=number).astype({name: object})
        lacking.append(rows.assign(**{name: None}))
    return pd.concat([frame.astype(object), *lacking]).sample(frac=1, random_state=1).infer_objects()


def tie_hash(values: list[int], seed: int) -> int:
    """Return the hash that orders interactions of a user at the same time, as docs/own-data.md defines it."""
    state, most = 0, (1 << 64) - 1
    for value in values:
        state = ((state ^ (value & most)) + (seed + 1) * 0x9E3779B97F4A7C15) & most
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & most
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & most
        state ^= state >> 31
    return state


def expected_requests(frame: pd.DataFrame, options: dict[str, Any]) -> dict[str, list[Any]]:
    """Return (user, device, history, positives, excluded items) of every request, by a loop over interactions.

    By definition, the history holds strictly earlier items, and an item that the user had before is a positive only if
    repeats are allowed. Items of the user from the time of the first positive to that of the last are not candidates.
    """
    found: dict[str, list[Any]] = {split: [] for split in SPLITS}
    window, eval_window = options.get("window", 10), options.get("eval_window")
    repeats, days = options.get("repeats", False), options.get("window_days")
    unique: dict[Any, Any] = {}
    for row in frame.itertuples():
        key = (row.user, row.time, row.item)
        held = unique.get(key)
        mine = (SPLITS.index(row.split) if options["split"] == "given" else 0, -row.weight)
        unique[key] = mine if held is None else min(mine, held)
    times = sorted(frame.time)
    cuts = [times[int(share * len(times))] for share in (1 - 0.2 - 0.1, 1 - 0.1)]
    for user in sorted(set(frame.user)):
        key = int(id_keys([user]).keys[0])
        events = sorted(
            ((time, item, *value) for (who, time, item), value in unique.items() if who == user),
            key=lambda one: (one[0], tie_hash([key, one[1], one[0] * 86_400 * 10**6], options.get("split_seed", 0))),
        )
        for number, split in enumerate(SPLITS):
            allowed = [event for event in events if options["split"] != "given" or event[2] <= number]
            if options["split"] != "given" and events != allowed:
                raise AssertionError
            fresh, seen = [], set()
            for event in allowed:
                if repeats or event[1] not in seen:
                    fresh.append(event)
                seen.add(event[1])
            if options["split"] == "time":
                own = [e for e in fresh if sum(e[0] >= cut for cut in cuts) == number]
            elif options["split"] == "leave_last":
                n = options["leave"]
                edges = [0, len(fresh) - 2 * n, len(fresh) - n, len(fresh)]
                own = fresh[edges[number] : edges[number + 1]] if len(fresh) > 2 * n else fresh if number == 0 else []
            else:
                own = [e for e in fresh if e[2] == number]
            groups: list[list[Any]] = []
            for event in own:
                if number == 0:
                    full = not groups or len(groups[-1]) == window
                    cell = days and groups and (event[0] - own[0][0]) // days != (groups[-1][0][0] - own[0][0]) // days
                    if full or cell:
                        groups.append([])
                    groups[-1].append(event)
                else:
                    groups = groups or [[]]
                    late = days and groups[0] and event[0] - groups[0][0][0] >= days
                    if not late and (eval_window is None or len(groups[0]) < eval_window):
                        groups[0].append(event)
            last = -1
            for group in groups:
                distinct: dict[int, float] = {}
                for event in group:
                    last = last if event[1] in distinct else event[0]
                    distinct.setdefault(event[1], -event[3])
                history = [event[1] for event in allowed if event[0] < group[0][0]]
                begin = group[0][0] if repeats else -1
                same_time = {event[1] for event in allowed if begin <= event[0] <= last}
                found[split].append(((user, device_of(group[0][1], group[0][0])), history, distinct, same_time))
    return found


def loaded_requests(data: InteractionsDataModule, split: str) -> list[Any]:
    """Return the requests that the data module loads, with raw ids and the excluded items."""
    users = data.prepared.users["key"]
    encoder, shard = data.prepared.encoder, data.shard(split)
    names, devices = (
        {int(encoder.vocabularies[table].encode([name])[0]): name for name in own}
        for table, own in (("user", data.prepared.user_ids.tolist()), ("device", ["tv", "phone", "web"]))
    )
    catalogue = data.catalogue(split)
    views = {
        int(row[0]): int(item) for row, item in zip(data.prepared.items["ids"], data.prepared.item_ids, strict=True)
    }
    assert len(users) == 4
    found = []
    for batch in data.loader([split], training=False):
        excluded = shard.excluded(len(found) + np.arange(batch.size))
        assert excluded is not None
        for row in range(batch.size):
            listed = batch.item_id[batch.candidates[row]][batch.mask[row]].tolist()
            labels = batch.labels[row][batch.mask[row]].tolist()
            number = int(batch.history_length[row])
            history = [views[int(view[0])] for view in batch.history[row, :number]]
            assert not batch.history[row, number:].any()
            assert [int(catalogue.item_id[place]) for place in batch.pool_rows] == batch.item_id.tolist()
            had = set(catalogue.item_id[excluded[row][excluded[row] >= 0]].tolist())
            who = names[int(batch.request[row, 0])], devices[int(batch.request[row, 1])]
            found.append((who, history, dict(zip(listed, labels, strict=True)), had))
    return found


OPTIONS: list[dict[str, Any]] = [
    {"split": "time", "val_fraction": 0.2, "window": 3},
    {"split": "time", "val_fraction": 0.2, "repeats": True, "window": 4, "eval_window": 5},
    {"split": "time", "val_fraction": 0.2, "window": None, "window_days": 6.0},
    {"split": "leave_last", "leave": 1, "window": 2},
    {"split": "leave_last", "leave": 1, "window": 2, "split_seed": 3},
    {"split": "leave_last", "leave": 2, "repeats": True, "window_days": 9.0, "window": 5},
    {"split": "given", "window": 3},
    {"split": "given", "window": 2, "repeats": True, "eval_window": 3},
    {"split": "time", "val_fraction": 0.2, "window": 3, "min_rating": 2},
    {"split": "leave_last", "leave": 2, "window": 4, "min_rating": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: "-".join(map(str, one.values())))
def test_requests_equal_loop_over_interactions(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "CHUNK_ROWS", 150)  # several chunks
    frame = adversarial(len(options))
    if options["split"] == "leave_last":  # integers, one of them negative; else text
        frame["user"] = frame.user.map({"ann": 3, "bob": -5, "7": 7, "eve": 10**12})
    expected = expected_requests(frame[frame.rating >= options.get("min_rating", 0)], options)
    days = frame.assign(time=frame.time * 86_400, device=list(map(device_of, frame.item, frame.time)))
    if "min_rating" in options:
        days = with_missing(days)
    given = {"split_column": "split"} if options["split"] == "given" else {}
    plain: dict[str, Any] = {"user": {"user": "categorical"}, "items": {"item": "categorical"}, "history": ["item"]}
    plain["context"] = {"device": "categorical"}
    # A vocabulary of the training data maps new items to one row; these tables keep all items distinct.
    plain["tables"] = {"item": {"kind": "dense"}, "user": {"kind": "hash", "rows": 1000}}
    data = InteractionsDataModule(
        interactions=days, weight="weight", features=plain, batch_size=7, history_length=500, eval_negatives=0,
        cache_dir=str(tmp_path), **{**options, **given},
    )  # fmt: skip
    for split in SPLITS:
        found = loaded_requests(data, split)
        assert len(found) == len(expected[split]) > 0
        ours = sorted((user, tuple(history), tuple(positives.items())) for user, history, positives, _ in found)
        loop = sorted(
            (user, tuple(history), tuple(positives.items())) for user, history, positives, _ in expected[split]
        )
        assert ours == loop
        excluded = {(user, tuple(history), *positives): items for user, history, positives, items in expected[split]}
        for user, history, positives, had in found:
            items = excluded[(user, tuple(history), *positives)]
            if split != "train":
                assert had == items
            else:  # the training catalogue holds the items of the training split
                assert set(history) | set(positives) | items & set(data.catalogue(split).item_id.tolist()) <= had
            if not options.get("repeats"):
                assert not set(history) & set(positives), user
    shuffled = InteractionsDataModule(
        interactions=days.sample(frac=1, random_state=9), weight="weight", features=plain, batch_size=7,
        history_length=500, eval_negatives=0, cache_dir=str(tmp_path), **{**options, **given},
    )  # fmt: skip
    for split in SPLITS:  # the order of the rows does not matter
        rows = np.arange(len(data.shard(split)))
        for name in ("labels", "history", "candidates", "item_id", "request"):
            assert torch.equal(
                getattr(shuffled.shard(split).batch(rows), name), getattr(data.shard(split).batch(rows), name)
            )


@pytest.mark.parametrize("repeats", [False, True])
def test_items_of_the_same_user_and_time_are_not_candidates(tmp_path: Path, repeats: bool) -> None:
    draw = np.random.default_rng(1)
    times = [1, 2, 3, 4, 4, 4, 4]  # the test item, the validation item and two training items of a user are tied
    frame = pd.DataFrame(
        [(user, item, time) for user in range(200) for time, item in zip(times, draw.permutation(30), strict=False)],
        columns=["user", "item", "time"],
    )
    data = InteractionsDataModule(
        interactions=frame, split="leave_last", repeats=repeats, eval_negatives=40, train_negatives=40, window=1,
        cache_dir=str(tmp_path),
    )  # fmt: skip
    tied = frame[frame.time == 4].groupby("user").item.agg(set).to_dict()
    largest = 0
    for split in SPLITS:
        for batch in data.loader([split], training=split == "train"):
            full = data.add_negatives(batch)
            users = data.prepared.user_ids[data.prepared.table(split)["user"]]
            rows = np.searchsorted(data.prepared.table(split)["request_id"], batch.request_id.numpy())
            for number, user in enumerate(users[rows].tolist()):
                positives = set(full.item_id[full.candidates[number][full.labels[number] > 0]].tolist())
                candidates = set(full.item_id[full.candidates[number][full.mask[number]]].tolist())
                assert len(positives) == 1
                if positives <= tied[user]:
                    assert candidates & tied[user] == positives
                    assert len(candidates) > 20
                    largest += split == "test" and max(tied[user]) in positives
    assert 25 <= largest <= 75  # of 200 users with 4 items each: the hash does not prefer large ids


def small(tmp_path: Path, **options: Any) -> InteractionsDataModule:
    draw = np.random.default_rng(0)
    rows = 600
    user = draw.integers(0, 30, rows)
    frame = pd.DataFrame(
        {
            "user_id": user,
            "item_id": draw.integers(0, 50, rows),
            "timestamp": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.sort(draw.integers(0, 10**6, rows)), unit="s"),
            "device": draw.choice(["tv", "web", None], rows),
        }
    )
    users = pd.DataFrame({"user_id": range(29), "age": [None if n % 5 == 0 else 20.0 + n for n in range(29)]})
    items = pd.DataFrame({
        "item_id": range(2, 60), "genres": ["Comedy|Drama" if n % 2 else "Drama" for n in range(58)],
        "plot": [[float(n), 1.0, -float(n)] for n in range(58)],
    })  # fmt: skip
    features = {
        "user": {"user_id": "categorical", "age": "numeric"},
        "context": {"device": "categorical", "at": {"kind": "time", "column": "timestamp"}},
        "items": {"item_id": "categorical", "genres": {"kind": "bag", "separator": "|"}, "plot": "vector"},
        "history": ["item_id", "plot"],
    }
    settings: dict[str, Any] = {"batch_size": 16, "eval_negatives": 10, "train_negatives": 4, "history_length": 7}
    return InteractionsDataModule(
        interactions=frame, users=users, items=items, features=features, cache_dir=str(tmp_path), window=4,
        **{**settings, **options},
    )  # fmt: skip


def test_interactions_keep_the_contract(tmp_path: Path) -> None:
    check_data_module(lambda: small(tmp_path))
    assert len(list(tmp_path.glob("interactions-*"))) == 1  # prepared once


def test_ages_are_the_seconds_before_the_newest_view(tmp_path: Path) -> None:
    data = small(tmp_path, ages=True)
    check_data_module(lambda: small(tmp_path, ages=True), rules=["batches match the schema"])
    frame = data._sources["interactions"].drop_duplicates(["user_id", "item_id", "timestamp"])
    assert data.schema.has_ages
    shard = data.shard("test")
    batch, users = shard.batch(np.arange(len(shard))), shard.users(np.arange(len(shard)))
    for row, user in enumerate(users.tolist()):
        length = int(batch.history_length[row])
        cut = frame[(frame.user_id == user)].sort_values(["timestamp", "item_id"])
        first = int(batch.item_id[batch.candidates[row, 0]])
        start = cut[(cut.item_id == first)].timestamp.min()
        times = cut[cut.timestamp < start].timestamp.to_numpy()[-7:]
        expected = (times[-1:] - times) / np.timedelta64(1, "s")
        assert batch.history_values[row, :length, -1].tolist() == pytest.approx(expected.tolist())
        assert not batch.history_values[row, length:].any()


def test_ages_of_raw_requests_are_those_of_the_users(tmp_path: Path) -> None:
    data = small(tmp_path, ages=True)
    items = data.serving_items()
    users = data.serving_users(items)
    frame = data._sources["interactions"].drop_duplicates(["user_id", "item_id", "timestamp"])
    cut = frame[frame.user_id == 3].sort_values(["timestamp", "item_id"])
    ages = (cut.timestamp.max() - cut.timestamp).dt.total_seconds()
    views = [{"item": int(item), "seconds_ago": age} for item, age in zip(cut.item_id, ages, strict=True)]
    named = EncodedRequests.of_users(users, users.index.rows([3]), data.schema)
    options = (data.encoder, items, data.schema, 7)
    given = EncodedRequests.of_rows([{"user_id": 3, "history": views}], *options)
    np.testing.assert_array_equal(given.history, named.history)
    np.testing.assert_allclose(given.history_values, named.history_values)
    with pytest.raises(ValueError, match="the model reads the age of each view"):
        EncodedRequests.of_rows([{"user_id": 3, "history": [5]}], *options)


def test_ages_without_times_raise(tmp_path: Path) -> None:
    table = pd.DataFrame({"user": [1, 1, 1, 1], "item": [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="ages needs a column of times"):
        InteractionsDataModule(interactions=table, ages=True, cache_dir=str(tmp_path)).prepare_data()


def test_features_belong_to_the_right_user_item_and_context(tmp_path: Path) -> None:
    data = small(tmp_path)
    schema, encoder = data.schema, data.prepared.encoder
    frame, users = data._sources["interactions"], data._sources["users"]
    assert [feature.name for feature in schema.request] == [
        "user_id", "age", "age_missing", "device", "at_hour", "at_weekday",
    ]  # fmt: skip
    batch = data.shard("test").batch(np.arange(len(data.shard("test"))))
    at, of = schema.id_columns("request"), schema.value_columns("request")
    ages = users.age.dropna()
    trained = users.user_id.isin(frame.user_id[: int(0.8 * len(frame))])
    mean = users.age[trained].mean()
    for row in range(batch.size):
        first = int(batch.item_id[batch.candidates[row, 0]])
        user = next(u for u in range(30) if encoder.vocabularies["user_id"].encode([u])[0] == batch.request[row, 0])
        mine = frame[(frame.user_id == user) & (frame.item_id == first)].sort_values("timestamp").iloc[0]
        known = user < 29 and not np.isnan(users.age[user])
        assert float(batch.request_values[row, of["age_missing"]]) == (not known)
        if known:
            sign = np.sign(users.age[user] - mean)
            assert np.sign(float(batch.request_values[row, of["age"]])) == sign
        device = encoder.vocabularies["device"].encode(np.array([mine.device], dtype=object))[0]
        assert int(batch.request[row, at["device"]]) == device
        assert int(batch.request[row, at["at_hour"]]) == mine.timestamp.hour + 1
        assert int(batch.request[row, at["at_weekday"]]) == mine.timestamp.isoweekday()
    assert len(ages) > 20
    items = schema.id_columns("items")
    for item, ids in zip(batch.item_id.tolist(), batch.items, strict=True):
        genres = [] if item < 2 else ["Comedy", "Drama"] if item % 2 else ["Drama"]
        expected = encoder.vocabularies["genres"].encode(np.array(genres, dtype=object)).tolist() if genres else []
        assert ids[items["genres"]].tolist() == expected + [0] * (2 - len(expected))
    assert data.catalogue("test").item_id.tolist() == list(range(60))
    train = set(frame.item_id[: int(0.8 * len(frame))])
    assert set(data.catalogue("train").item_id.tolist()) == train


def test_number_of_popularity_tickets_is_known_on_the_host(tmp_path: Path) -> None:
    catalogue = small(tmp_path).catalogue("train", DEVICE)
    with no_host_reads():
        tickets = catalogue.popular.tickets
    assert tickets == small(tmp_path).catalogue("train").popular.tickets


def test_training_negatives_are_items_of_the_training_split(tmp_path: Path) -> None:
    data = small(tmp_path, train_negatives=5)
    known = set(data.catalogue("train").item_id.tolist())
    for batch in data.train_dataloader():
        grown = data.add_negatives(batch)
        assert set(grown.item_id[grown.candidates[grown.mask]].tolist()) <= known


def test_saved_encoder_can_be_used_for_newer_data(tmp_path: Path) -> None:
    first = small(tmp_path)
    saved = tmp_path / "encoder"
    first.prepared.encoder.save(saved)
    newer = InteractionsDataModule(
        interactions=pd.DataFrame(
            {"user_id": [1] * 6, "item_id": [*range(45, 51)], "timestamp": pd.date_range("2025-01-01", periods=6),
             "device": "tv"}
        ),
        users=first._sources["users"], items=first._sources["items"], features=str(saved), split="leave_last",
        cache_dir=str(tmp_path),
    )  # fmt: skip
    assert newer.schema == first.schema
    assert len(newer.shard("test")) == 1


def base(**changes: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {"user": [1, 1, 1, 2, 2, 2], "item": [1, 2, 3, 1, 2, 3], "time": [1, 2, 3, 4, 5, 6]}
    return {"interactions": pa.table({**columns, **changes})}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no user": ({"interactions": pa.table({"who": [1], "item": [1]})}, "no column that looks like the user"),
    "wrong user": ({**base(), "user": "usr"}, "no column 'usr'; did you mean 'user'"),
    "nothing": ({}, "no interactions are given"),
    "all missing": (base(user=pa.nulls(6)), "no interactions that can be used: 6 with no user"),
    "no time": (base(time=["soon"] * 6), "column 'time' has a value that is not a time"),
    "items in lists": (base(item=[[1], [2]] * 3), "column 'item' .* has lists .*one item per row. Use --data lists"),
    "ms among s": (
        base(time=[1600000000, 1600000001, 1600000002000] * 2),
        "'time' mixes units: .* 1600000000",
    ),
    "one time": (base(time=[7] * 6), "train split has no positives .*all interactions have the same time"),
    "text rating": ({**base(rating=["good"] * 6), "min_rating": 3}, "column 'rating' must have numbers: .*'good'"),
    "no split": ({**base(), "val_from": "2030-01-01", "test_from": "2031-01-01"}, "the val split has no positives"),
    "one item": (base(item=[1] * 6), "split has no positives .*repeats"),
    "rating": ({**base(), "min_rating": 3}, "needs a column of ratings"),
    "low rating": ({**base(rating=[1] * 6), "min_rating": 3}, "6 with rating below 3"),
    "negative weight": ({**base(w=[-1.0] * 6), "weight": "w"}, "has the weight -1"),
    "split names": ({**base(part=["train", "tst"] * 3), "split_column": "part"}, "must say train, val or test"),
    "half given": ({**base(), "val": pa.table({"user": [1]})}, "val and test must be given together"),
    "no given split": ({**base(), "split": "given"}, "split='given' needs the tables val and test, or split_column"),
    "unused split": ({**base(part=["train"] * 6), "split_column": "part", "split": "time"}, "'time' does not use val"),
    "date": ({**base(), "val_from": "soon", "test_from": "later"}, "a date is written YYYY-MM-DD"),
    "two users": (
        {**base(), "users": pa.table({"user": [1, 1], "age": [3, 4]})},
        "1 repeated rows, e.g. of user 1; keep one row per user",
    ),
    "described": (
        {**base(), "features": {"items": {"price": "numeric"}}},
        "columns price, and there is no table",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_input_raises_one_line_and_leaves_no_files(name: str, tmp_path: Path) -> None:
    given, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        InteractionsDataModule(**{"split": None, **given}, cache_dir=str(tmp_path)).prepare_data()
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def test_folder_or_file_without_interactions_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no file that ends in .parquet"):
        InteractionsDataModule(str(tmp_path)).prepare_data()
    with pytest.raises(ValueError, match=r"has no file that ends in .parquet"):
        guess_files([str(tmp_path)], {})
    (tmp_path / "log.csv").write_text("item,stamp\n1,2\n")
    with pytest.raises(
        ValueError, match=r"log.csv has no column that looks like the user; name it: .*has: item, stamp"
    ):
        InteractionsDataModule(str(tmp_path / "log.csv")).prepare_data()


def test_context_column_of_another_type_in_a_later_table_raises(tmp_path: Path) -> None:
    features = {"user": ["user"], "items": ["item"], "context": {"device": "categorical"}}
    tables = [base(device=device)["interactions"] for device in ([1] * 6, ["tv"] * 6, [1] * 6)]
    data = InteractionsDataModule(
        interactions=tables[0], val=tables[1], test=tables[2], features=features, repeats=True, cache_dir=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"'device' is string in the pyarrow.Table and int64 before; make it one type"):
        data.prepare_data()


def test_splits_from_files_and_counts_of_skipped_rows(tmp_path: Path) -> None:
    for name, rows in {
        "clicks": "1,5,1,5\n1,6,2,4\n1,7,,5\n,7,2,5\n2,5,3,5\n2,6,4,1\n2,5,3,5\n",
        "val": "1,8,9,4\n",
    }.items():
        (tmp_path / f"{name}.csv").write_text(f"user,item,ts,rating\n{rows}")
    data = InteractionsDataModule(
        str(tmp_path / "clicks.csv"), val=tmp_path / "val.csv", test=pd.DataFrame(
            {"user": [2], "item": [9], "ts": [11], "rating": [5.0]}
        ), min_rating=4, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    assert [len(data.shard(split)) for split in SPLITS] == [2, 1, 1]
    facts = data.prepared.facts
    assert facts["left_out"] == {"no user": 1, "no ts": 1, "rating below 4 or missing": 1, "repeated rows": 1}
    assert facts["times"] == "seconds, 1970-01-01 to 1970-01-01"
    assert json.loads((data.prepared.folder / "facts.json").read_text()) == facts
    batch = data.shard("test").batch(np.arange(1))
    assert batch.item_id.tolist() == [9]
    assert batch.history_length.tolist() == [1]  # a rating of 1 does not count as an interaction


def test_prepare_prints_its_guesses_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = "\n".join(f"u{n % 5},i{n % 11},{1_700_000_000_000 + n}" for n in range(60))
    (tmp_path / "log.csv").write_text(f"userId,movieId,timestamp\n{rows}\n")
    command = ["prepare", "--data", "interactions", "--data.root", str(tmp_path / "log.csv")]
    assert main([*command, "--data.cache_dir", str(tmp_path / "cache")]) == 0
    output = capsys.readouterr().out
    assert "user = userId, item = movieId, time = timestamp" in output
    assert "times: milliseconds, 2023-11-14 to 2023-11-14" in output
    assert "preparing" in caplog.text
    assert "times: milliseconds" not in caplog.text
    data = InteractionsDataModule(str(tmp_path / "log.csv"), cache_dir=str(tmp_path / "cache"))
    assert sorted(data.prepared.item_ids.tolist()) == sorted({f"i{n}" for n in range(11)})
    assert main(["prepare", "--data", "interactions", "--data.root", str(tmp_path / "no.csv")]) == 2


def test_history_feature_that_items_lack_raises_before_training(tmp_path: Path) -> None:
    features = {"user": ["user"], "history": {"item": "categorical"}}
    data = InteractionsDataModule(interactions=adversarial(0), features=features, cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="describe it under items"):
        data.prepare_data()


@pytest.mark.parametrize("table", ["items", "users"])
def test_table_without_any_of_the_ids_raises(tmp_path: Path, table: str) -> None:
    key = table.removesuffix("s")
    other: Any = {table: pd.DataFrame({key: ["007", "008"], "kind": ["a", "b"]})}
    data = InteractionsDataModule(interactions=adversarial(0), **other, cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=f"none of the .* ids of the interactions is in column '{key}'"):
        data.prepare_data()


@pytest.mark.parametrize("split", ["time", "given"])
def test_export_holds_each_user_after_the_last_interaction(tmp_path: Path, split: str) -> None:
    frame = adversarial(4).drop(columns=["weight"] if split == "given" else ["weight", "split"])
    data = InteractionsDataModule(interactions=frame, history_length=7, cache_dir=str(tmp_path))
    items = data.serving_items()
    users = data.serving_users(items)
    assert users.names.tolist() == sorted(set(frame.user))
    assert items.names.tolist() == sorted(set(frame.item))
    row_of = {int(row[0]): int(name) for row, name in zip(items.ids, items.names, strict=True)}
    for row, name in enumerate(users.names):
        own = frame[frame.user == name].drop_duplicates(["item", "time"])
        key = int(id_keys([name]).keys[0])
        tie = [tie_hash([key, item, time * 10**6], 0) for item, time in zip(own["item"], own.time, strict=True)]
        own = own.assign(tie=tie).sort_values(["time", "tie"])
        length = int(users.history_length[row])
        assert [row_of[int(view[0])] for view in users.history[row, :length]] == own.item.tolist()[-7:]
        assert not users.history[row, length:].any()
        assert items.names[users.seen_of(row)].tolist() == sorted(set(own.item))
        assert users.request[row].tolist() == data.encoder.encode("user", [{"user": name}]).ids[0].tolist()


def test_export_keeps_item_names_and_the_newest_context(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "user": np.repeat([5, 3], 20),
            "item": [f"film-{n % 13}" for n in range(40)],
            "time": range(40),
            "device": ["phone", "tv"] * 20,
        }
    )
    described = {"user": ["user"], "items": ["item"], "context": ["device"], "history": ["item"]}
    data = InteractionsDataModule(
        interactions=frame, features=described, split="leave_last", repeats=True, cache_dir=str(tmp_path)
    )
    items = data.serving_items()
    users = data.serving_users(items)
    assert sorted(items.names.tolist()) == sorted(set(frame.item))
    assert users.names.tolist() == [3, 5]
    assert items.index.rows(["film-4"])[0] in users.seen_of(0)
    newest = [frame[frame.user == name].iloc[-1] for name in users.names]
    wanted = data.encoder.encode("context", [{"device": row.device} for row in newest]).ids
    assert users.request[:, -1].tolist() == wanted[:, 0].tolist()


def test_ids_beyond_63_bits_are_kept(tmp_path: Path) -> None:
    item = [2**64 - 1 - n % 9 if n % 2 else 10**18 + n % 9 for n in range(60)]
    user = [2**63 + n % 3 for n in range(60)]
    table = pa.table({"user": pa.array(user, pa.uint64()), "item": pa.array(item, pa.uint64()), "time": range(60)})
    data = InteractionsDataModule(interactions=table, repeats=True, cache_dir=str(tmp_path))
    assert sorted(map(int, data.prepared.item_ids)) == sorted(set(item))
    assert sorted(map(int, data.prepared.user_ids)) == sorted(set(user))
