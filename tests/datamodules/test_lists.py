"""Logged lists from rows in any order, nested tables and SVMlight files, against loops and RecFlow."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from recsys_topk.datamodules import CascadeDataModule, RecFlowDataModule, WorldConfig, restore, simulate
from recsys_topk.datamodules.lists import preparation
from recsys_topk.datamodules.lists.datamodule import ListsDataModule
from recsys_topk.datamodules.lists.plan import COUNTS
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.columns import keys_of
from recsys_topk.testing import check_data_module

SPLITS = ("train", "val", "test")
STAGES = {"shown": "30 - position", "ranked": 7, "recalled": 5}
Row = dict[str, Any]


def funnel(requests: int = 60, seed: int = 0) -> list[Row]:
    """Return a shuffled funnel log: three stages, positions of shown items, changing prices, a history."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for request in range(requests):
        items = draw.sample(range(40), draw.randint(1, 9))
        history = [f"v{draw.randrange(40)}" for _ in range(draw.randrange(4))]
        for place, item in enumerate(items):
            stage = "shown" if place < 2 else draw.choice(["ranked", "recalled"])
            rows.append({
                "request_id": f"r{request}", "user_id": request % 7, "item_id": f"v{item}", "stage": stage,
                "position": place + 1 if place < 2 else None, "timestamp": 1_700_000_000 + 60 * request + place,
                "price": draw.choice([1.0, 2.0]) * item, "device": ["phone", "desk"][request % 2], "history": history,
            })  # fmt: skip
    draw.shuffle(rows)
    return rows


def found_lists(data: CascadeDataModule, split: str) -> dict[int, dict[int, tuple[float, int]]]:
    """Return per request item -> (label, group), as the loaders give them."""
    found: dict[int, dict[int, tuple[float, int]]] = {}
    for batch in data.loader(data.splits[split], training=False):
        for b, request in enumerate(batch.request_id.tolist()):
            real = batch.mask[b]
            items = (batch.item_id[batch.candidates[b][real]] % VARIANT).tolist()
            pairs = zip(batch.labels[b][real].tolist(), batch.group[b][real].tolist(), strict=True)
            assert request not in found
            found[request] = dict(zip(items, pairs, strict=True))
            assert len(found[request]) == len(items)
    return found


def expected_lists(rows: list[Row]) -> dict[str, dict[str, tuple[float, int]]]:
    lists: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for row in rows:
        group = list(STAGES).index(row["stage"])
        label = 30.0 - row["position"] if group == 0 else float(STAGES[row["stage"]])
        lists[row["request_id"]][row["item_id"]] = (label, group)
    return lists


@pytest.mark.parametrize("form", ["shuffled rows", "nested", "many parts"])
def test_lists_equal_loop_over_rows(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = funnel()
    table = pa.Table.from_pylist(rows)
    if form == "nested":
        requests: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            requests[row["request_id"]].append(row)
        lists = ("item_id", "stage", "position", "price", "timestamp")
        nested = [{**own[0], **{name: [row[name] for row in own] for name in lists}} for own in requests.values()]
        for row in nested:
            row["timestamp"] = min(row["timestamp"])
        table = pa.Table.from_pylist(nested)
    elif form == "many parts":
        monkeypatch.setattr(preparation, "CHUNK_ROWS", 40)
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=50)
    data = ListsDataModule(
        str(tmp_path / "log.parquet"), labels=STAGES, split="time", cache_dir=str(tmp_path / "cache")
    )
    expected = expected_lists(rows)
    ids, seen = data.prepared.item_ids, {}
    assert ids is not None
    for split in SPLITS:
        names = data.prepared.request_ids(split)
        assert names is not None
        keys = keys_of(pa.array(names)).keys
        lists_of_split = found_lists(data, split)
        assert list(lists_of_split) == keys.tolist()
        for name, found in zip(names, lists_of_split.values(), strict=True):
            seen[name] = {ids[item]: pair for item, pair in found.items()}
    assert seen == expected
    first = {name: min(row["timestamp"] for row in rows if row["request_id"] == name) for name in expected}
    spans = [[first[name] for name in data.prepared.request_ids(split)] for split in SPLITS]  # type: ignore[union-attr]
    assert max(spans[0]) < min(spans[1]) <= max(spans[1]) < min(spans[2])
    assert all(span == sorted(span) for span in spans)
    assert not list((tmp_path / "cache").glob("*/work*"))
    assert not list((tmp_path / "cache").glob(".*.partial"))

    schema = data.schema
    assert schema.groups == tuple(STAGES)
    assert schema.positive_above == 7
    assert schema.labels == "places"
    assert [feature.name for feature in schema.request] == ["user_id", "device"]
    assert [feature.name for feature in schema.items] == ["item_id", "price"]
    prices = np.array([row["price"] for row in rows if row["request_id"] in data.prepared.request_ids("train")])  # type: ignore[operator]
    vocabulary = data.prepared.encoder.vocabularies["item_id"]
    by_request = {name: {row["item_id"]: row for row in rows if row["request_id"] == name} for name in expected}
    for split in SPLITS:
        for batch in data.loader([split], training=False):
            for b, name in enumerate(data.prepared.request_ids(split)):  # type: ignore[arg-type]
                own = by_request[name]
                at = batch.candidates[b][batch.mask[b]]
                items = [ids[item % VARIANT] for item in batch.item_id[at].tolist()]
                standard = [(own[item]["price"] - prices.mean()) / prices.std() for item in items]
                assert batch.item_values[at, 0].tolist() == pytest.approx(standard, abs=1e-5)
                history = next(iter(own.values()))["history"]
                views = batch.history[b, : int(batch.history_length[b]), 0].tolist()
                assert views == vocabulary.encode(keys_of(pa.array(history, pa.string())).keys).tolist()


def test_lists_keep_the_contract(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(funnel()), tmp_path / "log.parquet")
    options: dict[str, Any] = {"labels": STAGES, "batch_size": 16, "cache_dir": str(tmp_path / "cache")}
    check_data_module(lambda: ListsDataModule(str(tmp_path / "log.parquet"), **options))


def read_rows(root: Path, day: str, data: RecFlowDataModule) -> pa.Table:
    """Return one row per (request, item) of a day, read from RecFlow's files without the data module."""
    from recsys_topk.datamodules.recflow.pickles import load_pickle

    folder = root / "data" if (root / "data").is_dir() else root
    stages = load_pickle(folder / "request_id_dict" / f"{day}.pkl")
    positions = {
        (row["request_id"], row["video_id"]): row["rank_index"]
        for row in pyarrow.feather.read_table(folder / "all_stage" / f"{day}.feather").to_pylist()
        if row.get("rank_pos") == 1
    }
    rows = []
    for request, groups in stages.items():
        for stage in (group.stage for group in data.layout.groups):
            for video in np.asarray(groups[stage].array())[:10] if stage in groups else []:
                place = positions.get((request, int(video[0]))) if stage == "rank_pos" else None
                row = {"request_id": request, "video_id": int(video[0]), "stage": stage, "position": place}
                rows.append({**row, "split": "train"})
    return pa.Table.from_pylist(rows)


def test_rows_of_a_recflow_day_give_the_lists_of_recflow(tmp_path: Path) -> None:
    root = simulate(tmp_path / "world", WorldConfig(users=30, items=300, days=3, requests=60))
    recflow = RecFlowDataModule(str(root), cache_dir=str(tmp_path / "days"))
    recflow.prepare_data()
    day = recflow.splits["train"][0]
    rows = read_rows(Path(root), day, recflow)
    order = np.random.default_rng(0).permutation(rows.num_rows)
    held_out = pa.Table.from_pylist([
        {"request_id": -1 - number, "video_id": 1, "stage": "rank_neg", "split": split, "position": None}
        for number, split in enumerate(("val", "test"))
    ])  # fmt: skip
    table = pa.concat_tables([rows.take(order), held_out.select(rows.column_names).cast(rows.schema)])
    labels = {"rank_pos": "30 - position", "rank_neg": 7, "coarse_neg": 6, "prerank_neg": 5}
    lists = ListsDataModule(table, labels=labels, features={"items": ["video_id"]}, cache_dir=str(tmp_path / "lists"))
    assert found_lists(lists, "train") == found_lists(recflow, "train")
    assert lists.schema.groups == recflow.schema.groups
    assert (lists.schema.positive_above, lists.schema.labels) == (recflow.schema.positive_above, recflow.schema.labels)


LETOR = [
    "2 qid:3 1:0.5 4:-1.5 # doc a",
    "0 qid:1 2:1e-1",
    "# a comment",
    "1 qid:3 1:0.25 2:3",
    "",
    "1 qid:1 4:7",
]


@pytest.mark.parametrize("queries", ["qid", "file"])
def test_svmlight_files_become_dense_vectors(tmp_path: Path, queries: str) -> None:
    lines = LETOR if queries == "qid" else [LETOR[0], LETOR[3], LETOR[1], LETOR[5]]
    text = "\n".join(
        line if queries == "qid" else " ".join(w for w in line.split() if "qid" not in w) for line in lines
    )
    for name in ("train", "vali", "test"):
        (tmp_path / f"{name}.txt").write_text(text + "\n")
        if queries == "file":
            (tmp_path / f"{name}.txt.query").write_text("2\n2\n")
    # Untransformed values can be compared with the lines.
    features = {"items": {"features": {"kind": "vector", "transform": "none"}}}
    data = ListsDataModule(str(tmp_path), features=features, cache_dir=str(tmp_path / "cache"))
    for split in SPLITS:
        (batch,) = data.loader([split], training=False)
        numbers = [3, 1] if queries == "qid" else [0, 1]
        assert batch.request_id.tolist() == numbers
        assert batch.labels.tolist() == [[2.0, 1.0], [0.0, 1.0]]
        values = batch.item_values[batch.candidates].reshape(4, 4)
        expected = [[0.5, 0, 0, -1.5], [0.25, 3, 0, 0], [0, 0.1, 0, 0], [0, 0, 0, 7]]
        torch.testing.assert_close(values, torch.tensor(expected))
        assert batch.item_id.unique().numel() == 4
    assert data.schema.tables == ()
    assert data.schema.history == ()


def test_split_by_fraction_depends_only_on_the_request(tmp_path: Path) -> None:
    rows = [{key: row[key] for key in ("request_id", "item_id", "price")} | {"label": 1} for row in funnel(400)]
    options: dict[str, Any] = {"val_fraction": 0.2, "test_fraction": 0.3, "cache_dir": str(tmp_path)}
    some = {row["request_id"] for row in rows[:900]}

    def splits(chosen: list[Row], **more: Any) -> dict[str, set[str]]:
        data = ListsDataModule(pa.Table.from_pylist(chosen), **options, **more)
        return {split: set(data.prepared.request_ids(split)) for split in SPLITS}  # type: ignore[arg-type]

    whole, part = splits(rows), splits([row for row in rows if row["request_id"] in some], seed=7)
    assert all(part[split] == whole[split] & some for split in SPLITS)
    assert [len(whole[split]) / 400 for split in SPLITS] == pytest.approx([0.5, 0.2, 0.3], abs=0.08)
    assert splits(rows, split_seed=1) != whole


@pytest.mark.parametrize("rule", ["time", "fraction"])
def test_given_test_lists_are_the_whole_test_split(tmp_path: Path, rule: Any) -> None:
    rows = funnel(80)
    held_out = {row["request_id"] for row in rows[:40]}
    tables = [
        pa.Table.from_pylist([row for row in rows if (row["request_id"] in held_out) is own]) for own in (False, True)
    ]
    data = ListsDataModule(tables[0], test=tables[1], labels=STAGES, split=rule, cache_dir=str(tmp_path))
    assert set(data.prepared.request_ids("test")) == held_out  # type: ignore[arg-type]
    drawn = [set(data.prepared.request_ids(split)) for split in ("train", "val")]  # type: ignore[arg-type]
    assert drawn[0] | drawn[1] == {row["request_id"] for row in rows} - held_out
    assert drawn[0].isdisjoint(drawn[1])


def test_duplicates_and_long_lists_drop_the_worst_items_and_facts_count_them(tmp_path: Path) -> None:
    rows = funnel(30)
    again = [
        {**row, "stage": "recalled", "position": None} for row in rows[::3]
    ]  # one row per stage, as funnels log it
    data = ListsDataModule(
        pa.Table.from_pylist([*again, *rows]),
        labels=STAGES,
        duplicates="best",
        max_list_length=4,
        cache_dir=str(tmp_path),
    )
    ids, expected, cut = data.prepared.item_ids, expected_lists(rows), 0
    assert ids is not None
    for split in SPLITS:
        for name, found in zip(data.prepared.request_ids(split), found_lists(data, split).values(), strict=True):  # type: ignore[arg-type]
            every = sorted((label for label, _ in expected[name].values()), reverse=True)
            assert sorted((label for label, _ in found.values()), reverse=True) == every[:4]
            assert all(expected[name][ids[item]] == pair for item, pair in found.items())
            cut += len(every[4:])
    facts = "\n".join(data.facts())
    assert f"{len(again)} repeated rows left out" in facts
    assert f"{cut} items left out of lists longer than 4" in facts
    saved = dict(data.hparams)
    assert saved["left_out"] == ["root"]
    assert saved["labels"] == STAGES
    with pytest.raises(ValueError, match=r"root of .*ListsDataModule cannot be saved as plain values"):
        restore(saved)


def test_export_holds_the_newest_request_of_each_user(tmp_path: Path) -> None:
    rows = funnel(80)
    data = ListsDataModule(pa.Table.from_pylist(rows), labels=STAGES, history_length=2, cache_dir=str(tmp_path))
    items = data.serving_items()
    users = data.serving_users(items)
    assert users is not None
    assert set(items.names.tolist()) == {row["item_id"] for row in rows}
    assert users.names.tolist() == list(range(7))
    encoder = data.encoder
    for row, name in enumerate(users.names.tolist()):
        newest = max((one for one in rows if one["user_id"] == name), key=lambda one: one["timestamp"])
        parts = [encoder.encode(part, [newest], partial=True).ids[0].tolist() for part in ("user", "context")]
        assert users.request[row].tolist() == [*parts[0], *parts[1]]
        assert users.history_length[row] == min(2, len(newest["history"]))
        assert set(items.names[users.seen_of(row)].tolist()) == set(newest["history"]) & set(items.names.tolist())


@pytest.mark.parametrize("split", ["time", "fraction"])
def test_exported_items_have_the_counts_of_their_newest_request(tmp_path: Path, split: Any) -> None:
    rows = [{**row, "label": len(row["stage"]) % 2} for row in funnel(80)]
    features = {"items": {"item_id": "categorical", "price": "numeric", **dict.fromkeys(COUNTS, "numeric")}}
    data = ListsDataModule(
        pa.Table.from_pylist(rows), split=split, counts=True, features=features, cache_dir=str(tmp_path)
    )
    items = data.serving_items()
    assert sorted(items.names.tolist()) == sorted({row["item_id"] for row in rows})
    begun: dict[str, int] = {}
    for row in rows:
        begun[row["request_id"]] = min(row["timestamp"], begun.get(row["request_id"], row["timestamp"]))
    for name, values, count in zip(items.names.tolist(), items.values, items.count.tolist(), strict=True):
        own = sorted((row for row in rows if row["item_id"] == name), key=lambda row: begun[row["request_id"]])
        ages = begun[own[-1]["request_id"]] - begun[own[0]["request_id"]]
        told = dict(zip(COUNTS, (len(own) - 1, sum(row["label"] for row in own[:-1]), ages), strict=True))
        expected = data.encoder.encode("items", pa.Table.from_pylist([{**own[-1], **told}])).values
        assert values.tolist() == pytest.approx(expected[0].tolist())
        assert 1 <= count <= len(own)


def test_lists_without_users_export_no_users(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(funnel()).drop_columns(["user_id"])
    data = ListsDataModule(table, labels=STAGES, cache_dir=str(tmp_path))
    assert data.serving_users(data.serving_items()) is None


@pytest.mark.parametrize("text", [False, True])
def test_batches_name_the_users_of_their_lists(tmp_path: Path, text: bool) -> None:
    rows = funnel()
    for row in rows:
        number = row["user_id"]
        row["user_id"] = None if number == 3 else f"u{number}" if text else number
    data = ListsDataModule(pa.Table.from_pylist(rows), labels=STAGES, batch_size=2, cache_dir=str(tmp_path))
    expected = {row["request_id"]: None if row["user_id"] is None else str(row["user_id"]) for row in rows}
    found = {}
    for batch in data.test_dataloader():
        found |= dict(zip(data.request_names("test", batch.request_id.numpy()).tolist(), batch.users, strict=True))
    assert found == {request: expected[request] for request in found}
    assert len(found) == 6
    assert None in found.values()
