"""Lists as they are published: one row per request with shown and clicked items, and histories beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_topk.cascades.default_stages import default_k, default_stages
from recsys_topk.datamodules.lists.datamodule import ListsDataModule
from recsys_topk.datamodules.lists.guess import guess_lists, looks_like_lists
from recsys_topk.datamodules.lists.plan import COUNTS
from recsys_topk.runs.config import resolve
from recsys_topk.runs.data_kind import guess_kind
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.columns import keys_of
from tests.conftest import Result


def news(requests: int = 60) -> dict[str, Any]:
    """Return requests of one to nine shown articles, some of them clicked."""
    draw = np.random.default_rng(0)
    shown = [(draw.permutation(40)[: draw.integers(1, 10)] + 1000).tolist() for _ in range(requests)]
    return {
        "impression_id": list(range(requests)),
        "user_id": draw.integers(0, 12, requests).tolist(),
        "impression_time": [1_600_000_000 + 60 * number for number in range(requests)],
        "article_id": [None] * requests,
        "device_type": draw.integers(0, 3, requests).tolist(),
        "next_read_time": draw.random(requests).tolist(),
        "article_ids_inview": shown,
        "article_ids_clicked": [draw.permutation(own)[: draw.integers(0, 3)].tolist() for own in shown],
    }


def write_table(table: pa.Table, folder: Path, name: str, parts: int) -> None:
    """Write a table as one file, or as several."""
    for part in range(parts):
        rows = table.slice(part * len(table) // parts, (part + 1) * len(table) // parts - part * len(table) // parts)
        pq.write_table(rows, folder / (f"{name}.parquet" if parts == 1 else f"{name}-{part}.parquet"))


def write_folder(folder: Path, text: bool = False, parts: int = 1) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """Write requests and histories as two tables; return both."""
    rows, draw = news(), np.random.default_rng(1)
    views = {user: draw.integers(1000, 1040, user).tolist() for user in range(10)}  # two users have no history
    folder.mkdir()
    columns = dict(rows)
    if text:
        marked = zip(columns.pop("article_ids_inview"), columns.pop("article_ids_clicked"), strict=True)
        columns["impressions"] = [" ".join(f"{item}-{int(item in own)}" for item in shown) for shown, own in marked]
    write_table(pa.table(columns), folder, "behaviors", parts)
    seconds = [[1.0] * len(own) for own in views.values()]
    history = {"user_id": list(views), "article_id_fixed": list(views.values()), "read_time_fixed": seconds}
    write_table(pa.table(history), folder, "history", parts)
    return rows, views


@pytest.mark.parametrize(("text", "parts"), [(False, 1), (True, 1), (False, 3)])
def test_folder_of_published_lists_equals_loop_over_requests(tmp_path: Path, text: bool, parts: int) -> None:
    rows, views = write_folder(tmp_path / "news", text, parts)
    assert looks_like_lists([str(tmp_path / "news")], {})
    data = ListsDataModule(str(tmp_path / "news"), cache_dir=str(tmp_path / "cache"))
    described = data.plan.description
    assert "next_read_time" not in described.columns("context")  # known only afterwards
    item = described.items[0].columns[0]
    vocabulary = data.encoder.vocabularies[str(described.items[0].table)]
    found = {}
    for split in ("train", "val", "test"):
        shard = data.shard(split)
        batch = shard.batch(np.arange(len(shard)))
        for row, request in enumerate(batch.request_id.tolist()):
            there = batch.mask[row]
            listed = data.item_names(batch.item_id[batch.candidates[row][there]].numpy())
            labels = batch.labels[row][there].tolist()
            history = batch.history[row][: batch.history_length[row], 0].tolist()
            found[request] = ({int(name): label for name, label in zip(listed, labels, strict=True)}, history)
    assert len(found) == len(rows["impression_id"])
    for number, request in enumerate(rows["impression_id"]):
        clicked = rows["article_ids_clicked"][number]
        expected = {article: float(article in clicked) for article in rows["article_ids_inview"][number]}
        keys = keys_of(pa.array(views.get(rows["user_id"][number], []), pa.int64())).keys
        assert found[request] == (expected, vocabulary.encode(keys).tolist())
    assert item == ("impressions" if text else "article_ids_inview")


def test_clicked_item_that_was_not_shown_raises(tmp_path: Path) -> None:
    rows = news()
    rows["article_ids_clicked"][7] = [5]
    data = ListsDataModule(pa.table(rows), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"row 8: article_ids_clicked has 5, which is not in article_ids_inview; a"):
        data.prepare()


def test_config_of_published_lists_names_the_columns(tmp_path: Path) -> None:
    write_folder(tmp_path / "news")
    found, config = guess_lists([str(tmp_path / "news")], {})
    options = config["data"]["init_args"]
    assert (options["item"], options["label"], options["history"]) == (
        "article_ids_inview", "article_ids_clicked", "history",
    )  # fmt: skip
    reasons = {guess.column: guess.reason for guess in found.guesses["context"]}
    assert "afterwards" in reasons["next_read_time"]
    given = ListsDataModule(**options, cache_dir=str(tmp_path / "cache"))
    guessed = ListsDataModule(str(tmp_path / "news"), cache_dir=str(tmp_path / "cache"))
    assert given.prepare()
    assert not guessed.prepare()  # the same folder


def test_quotas_and_k_follow_the_length_of_lists(tmp_path: Path) -> None:
    rows = news()
    schema = ListsDataModule(pa.table(rows), cache_dir=str(tmp_path)).schema
    lengths = [len(shown) for shown in rows["article_ids_inview"][:48]]  # the training split
    assert schema.list_length == int(np.median(lengths))
    quotas = [
        stage.quota for stage in default_stages(schema.outline, schema.list_length, default_k(schema.list_length))
    ]
    assert quotas == [schema.list_length // 2, max(schema.list_length // 4, 1)]
    assert default_k(schema.list_length) == max(schema.list_length // 5, 1)
    sampled = ListsDataModule(pa.table(rows), train_negatives=50, cache_dir=str(tmp_path)).schema
    assert sampled.list_length == 0
    assert [stage.quota for stage in default_stages(sampled.outline)] == [30, 20]


def test_index_of_a_pandas_frame_is_no_feature(tmp_path: Path) -> None:
    rows = pa.table({**news(), "__index_level_0__": list(range(60))})
    plan = ListsDataModule(rows, cache_dir=str(tmp_path)).plan
    assert "__index_level_0__" not in [
        column for part in ("context", "items") for column in plan.description.columns(part)
    ]


def write_splits(root: Path) -> dict[str, Any]:
    """Write EB-NeRD's folders: requests and histories per split, articles next to them. Return the requests."""
    rows, _ = write_folder(root)
    (root / "behaviors.parquet").unlink()
    history = pq.read_table(root / "history.parquet")
    (root / "history.parquet").unlink()
    for name, part in (("train", slice(0, 45)), ("validation", slice(45, 60))):
        (root / name).mkdir()
        pq.write_table(pa.table({key: column[part] for key, column in rows.items()}), root / name / "behaviors.parquet")
        pq.write_table(history, root / name / "history.parquet")
    articles = {
        "article_id": list(range(1000, 1035)),  # five shown articles are not in the table
        "title": [f"title {number}" for number in range(35)],
        "category": [f"c{number % 4}" for number in range(35)],
        "device_type": [number % 3 for number in range(35)],  # also a column of the requests
        "total_inviews": list(range(35)),
    }
    pq.write_table(pa.table(articles), root / "articles.parquet")
    return rows


def test_folders_of_splits_and_a_table_of_articles_are_read_from_the_root(tmp_path: Path) -> None:
    rows = write_splits(tmp_path / "news")
    assert guess_kind(tmp_path / "news", {}) == "lists"
    data = ListsDataModule(str(tmp_path / "news"), cache_dir=str(tmp_path / "cache"))
    items = data.plan.description.columns("items")
    assert items == ["article_ids_inview", "category", "item_device_type"]  # no text, and nothing known afterwards
    assert "history" in data.plan.roles
    found = {split: set(data.prepared.table(split)["request_id"].tolist()) for split in ("train", "val", "test")}
    assert found["test"] == set(range(45, 60))  # the folder validation
    assert found["train"] | found["val"] == set(range(45))
    batch = data.shard("test").batch(np.arange(15))
    category = data.encoder.vocabularies["category"]
    row = batch.request_id.tolist().index(50)
    names = [f"c{(int(item) - 1000) % 4}" if item < 1035 else None for item in rows["article_ids_inview"][50]]
    keys, missing, _ = keys_of(pa.array(names, pa.string()))
    expected = np.where(missing, 0, category.encode(keys)).tolist()
    place = data.schema.id_columns("items")["category"].start
    assert batch.items[batch.candidates[row][batch.mask[row]], place].tolist() == expected


def test_files_of_mind_need_no_header(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    for name, first in (("MINDsmall_train", 0), ("MINDsmall_dev", 40)):
        folder = tmp_path / "mind" / name
        folder.mkdir(parents=True)
        lines = []
        for number in range(first, first + 40):
            shown = " ".join(f"N{item}-{item % 2}" for item in draw.permutation(30)[:5])
            views = " ".join(f"N{item}" for item in draw.permutation(30)[: number % 3])
            time = f"11/{12 + number // 60}/2019 {number % 12 + 1}:05:0{number % 10} {'AM' if number < 40 else 'PM'}"
            lines.append(f"{number + 1 - first}\tU{number % 7}\t{time}\t{views}\t{shown}")
        (folder / "behaviors.tsv").write_text("\n".join(lines) + "\n")
        news = [
            f'N{item}\t{"ab"[item % 2]}\ts{item % 5}\tA "title" {item}\t\thttps://x/{item}\t[]\t[]'
            for item in range(30)
        ]
        (folder / "news.tsv").write_text("\n".join(news) + "\n")
        (folder / "entity_embedding.vec").write_text("Q1\t0.1\n")
    assert guess_kind(str(tmp_path / "mind"), {}) == "lists"
    assert guess_kind(str(tmp_path / "mind" / "MINDsmall_train" / "behaviors.tsv"), {}) == "lists"
    data = ListsDataModule(str(tmp_path / "mind"), cache_dir=str(tmp_path / "cache"))
    expected = {"request": "impression_id", "user": "user_id", "time": "time", "history": "history",
                "item": "impressions", "label": "clicked"}  # fmt: skip
    assert data.plan.roles == expected
    assert data.plan.description.columns("items") == ["impressions", "category", "subcategory"]
    assert len(data.shard("test")) == 40
    assert len(data.shard("train")) + len(data.shard("val")) == 40
    batch = data.shard("test").batch(np.arange(40))
    names = np.array([int(name[1:]) for name in data.item_names(batch.item_id.numpy())])
    assert (batch.labels.numpy() == names[batch.candidates.numpy()] % 2).all()
    assert (batch.history_length.numpy() == (batch.request_id.numpy() + 39) % 3).all()
    times = data.prepared.table("test")["time"]
    assert times.min() == np.datetime64("2019-11-12T12:05:07", "us").astype(int)


def test_counts_of_earlier_requests_equal_a_loop(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    rows = [
        {
            "request": number,
            "item": f"i{item}",
            "time": 1_700_000_000 + number // 2 * 60 + int(place == 0),
            "label": label,
        }
        for number in draw.permutation(60).tolist()
        for place, (item, label) in enumerate(zip(draw.permutation(9)[:4], draw.integers(0, 2, 4), strict=True))
    ]
    table = pa.Table.from_pylist(rows)
    data = ListsDataModule(table, counts=True, cache_dir=str(tmp_path))
    features = {"items": {name: {"kind": "numeric", "transform": "none"} for name in COUNTS}}
    exact = ListsDataModule(table, counts=True, features=features, cache_dir=str(tmp_path))
    assert [feature.columns[0] for feature in data.plan.description.items] == ["item", *COUNTS]
    begun = {row["request"]: 1_700_000_000 + row["request"] // 2 * 60 for row in rows}
    for split in ("train", "val", "test"):
        batch = exact.shard(split).batch(np.arange(len(exact.shard(split))))
        names = exact.item_names(batch.item_id.numpy() % VARIANT)
        for line, request in enumerate(batch.request_id.tolist()):
            for at in batch.candidates[line][batch.mask[line]].tolist():
                seen = [row for row in rows if row["item"] == names[at] and begun[row["request"]] < begun[request]]
                first = min([begun[row["request"]] for row in seen], default=begun[request])
                expected = [len(seen), sum(row["label"] for row in seen), begun[request] - first]
                assert batch.item_values[at].tolist() == expected
    plain = ListsDataModule(table.drop_columns(["time"]), counts=True, cache_dir=str(tmp_path))
    assert [feature.columns[0] for feature in plain.plan.description.items] == ["item"]  # there are no times


def test_kind_of_data_is_guessed_if_it_is_not_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "news")
    (tmp_path / "clicks.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")
    (tmp_path / "recflow" / "all_stage").mkdir(parents=True)
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    kinds = {"news": "lists", "clicks.csv": "interactions", "recflow": None, "notes.csv": None, "absent": None}
    assert {name: guess_kind(str(tmp_path / name), {}) for name in kinds} == kinds
    assert guess_kind(str(tmp_path / "notes.csv"), {"user": "a", "item": "b"}) == "interactions"
    news = resolve({"data": {"root": str(tmp_path / "news")}})
    assert news["data"]["class_path"].endswith("ListsDataModule")
    assert news["data"]["init_args"]["counts"]
    assert news["model"]["monitor"] == "ranking_ndcg@10"
    named = resolve({"data": {"class_path": "lists", "root": str(tmp_path / "news")}})
    assert "counts" not in named["data"]["init_args"]  # no recipe if the kind is named
    assert resolve({"data": {"root": str(tmp_path / "absent")}})["data"]["class_path"].endswith("RecFlowDataModule")


def test_fit_needs_nothing_but_the_path(in_process: Callable[..., Result], tmp_path: Path) -> None:
    write_folder(tmp_path / "news")
    cache = ["--data.cache_dir", str(tmp_path / "cache")]
    done = in_process(tmp_path, "fit", "--data.root", "news", *cache, "--trainer.max_epochs", "2", "--name", "a")
    assert done.returncode == 0, done.stderr
    assert "ranking_ndcg@10" in done.stdout
