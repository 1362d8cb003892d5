"""Lists as they are published: one row per request with shown and clicked items, and histories beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_topk.cascades.default_stages import default_k, default_stages
from recsys_topk.datamodules.lists.datamodule import ListsDataModule
from recsys_topk.datamodules.lists.guess import guess_lists, looks_like_lists
from recsys_topk.tabular.tables.columns import keys_of


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


def write_folder(folder: Path, text: bool = False) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """Write requests and histories as two tables; return both."""
    rows, draw = news(), np.random.default_rng(1)
    views = {user: draw.integers(1000, 1040, user).tolist() for user in range(10)}  # two users have no history
    folder.mkdir()
    columns = dict(rows)
    if text:
        marked = zip(columns.pop("article_ids_inview"), columns.pop("article_ids_clicked"), strict=True)
        columns["impressions"] = [" ".join(f"{item}-{int(item in own)}" for item in shown) for shown, own in marked]
    pq.write_table(pa.table(columns), folder / "behaviors.parquet")
    seconds = [[1.0] * len(own) for own in views.values()]
    history = {"user_id": list(views), "article_id_fixed": list(views.values()), "read_time_fixed": seconds}
    pq.write_table(pa.table(history), folder / "history.parquet")
    return rows, views


@pytest.mark.parametrize("text", [False, True])
def test_folder_of_published_lists_equals_loop_over_requests(tmp_path: Path, text: bool) -> None:
    rows, views = write_folder(tmp_path / "news", text)
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
