"""Prepared files of another program: the code of docs/prepared-format.md is checked, trained on, and damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from recsys_topk.cli.main import main
from recsys_topk.datamodules import InteractionsDataModule, ListsDataModule
from recsys_topk.datamodules.prepare.check import check_prepared

PAGE = Path(__file__).parents[2] / "docs" / "prepared-format.md"


def log() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    items = np.concatenate([draw.permutation(60)[:12] for _ in range(30)])
    return pd.DataFrame({"user": np.repeat(np.arange(30) + 5, 12), "item": items, "time": draw.permutation(360)})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a folder that the code of the page has written."""
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert match
    names: dict[str, Any] = {}
    exec(match[1], names)
    names["prepare"](log(), tmp_path / "prepared")
    return tmp_path / "prepared"


def test_files_of_the_page_equal_those_of_prepare(written: Path, tmp_path: Path) -> None:
    theirs = InteractionsDataModule(str(written))
    ours = InteractionsDataModule(interactions=log(), split="leave_last", window=1, cache_dir=str(tmp_path / "cache"))
    assert not theirs.prepare()
    assert theirs.outline.parts == ours.outline.parts
    for split in ("train", "val", "test"):
        one, other = theirs.shard(split), ours.shard(split)
        assert len(one) == len(other)
        batches = [shard.batch(np.arange(len(shard))) for shard in (one, other)]
        for name in ("history_length", "labels", "mask", "item_id", "candidates"):
            assert getattr(batches[0], name).tolist() == getattr(batches[1], name).tolist()
        for name, table in (("request", "user"), ("items", "item"), ("history", "item")):
            row = getattr(batches[0], name).numpy()
            expected = np.where(row > 0, ours.encoder.vocabularies[table].encode(row - 1), 0)
            assert np.array_equal(getattr(batches[1], name).numpy(), expected)


def test_files_of_the_page_are_checked_and_trained_on(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--check", str(written)]) == 0
    assert "events: 360 rows" in capsys.readouterr().out
    options = ["--data", "interactions", "--data.root", str(written), "--trainer.max_epochs", "1", "--name", "theirs"]
    assert main(["fit", *options, "--data.eval_negatives", "20", "--out", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs" / "theirs" / "checkpoints" / "last.ckpt").is_file()


def test_lists_written_from_the_page_equal_those_of_prepare(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    request = np.repeat(np.arange(24), 4)
    item = np.concatenate([draw.permutation(9)[:4] for _ in range(24)])
    log = pd.DataFrame({"request": request, "item": item, "label": draw.integers(0, 3, 96).astype(np.float32)})
    log["split"] = np.array(["train", "train", "val", "test"])[request % 4]
    folder = tmp_path / "written"
    (folder / "features").mkdir(parents=True)
    facts: dict[str, Any] = {"rows": 96, "requests": {}, "items": {}, "counts": {}}
    for split, own in log.groupby("split"):
        items, numbers, count = np.unique(own["item"], return_inverse=True, return_counts=True)
        start = np.arange(0, len(own), 4)
        frames = {
            split: {"request_id": own["request"].to_numpy()[start], "start": start, "length": 4, "time": 0},
            f"{split}-rows": {"item": numbers, "label": own["label"].to_numpy(), "group": 0},
            f"{split}-items": {"item_id": items, "count": count, "ids": (items + 1)[:, None].tolist()},
        }
        for name, columns in frames.items():
            pd.DataFrame(columns).to_parquet(folder / f"{name}.parquet")
        facts["requests"][split], facts["items"][split] = start.size, items.size
    features = {"format": 1, "description": {"items": {"item": "categorical"}}, "states": {}}
    tables = {"format": 1, "tables": {"item": {"kind": "dense", "rows": 11, "offset": 1, "padding": 0}}}
    for place, text in {"facts": facts, "features/features": features, "features/vocabularies": tables}.items():
        (folder / f"{place}.json").write_text(json.dumps(text))
    assert check_prepared(folder)["train-rows"] == 48
    theirs = ListsDataModule(str(folder))
    description = {"items": {"item": "categorical"}, "tables": {"item": "dense"}}
    ours = ListsDataModule(log, features=description, cache_dir=str(tmp_path / "cache"))
    assert theirs.schema == ours.schema
    for split in ("train", "val", "test"):
        batches = [data.shard(split).batch(np.arange(len(data.shard(split)))) for data in (theirs, ours)]
        for name in ("request_id", "labels", "mask", "item_id", "candidates", "items", "group"):
            assert getattr(batches[0], name).tolist() == getattr(batches[1], name).tolist(), name


def test_own_prepared_files_pass_the_check(tmp_path: Path) -> None:
    data = InteractionsDataModule(interactions=log(), split="leave_last", cache_dir=str(tmp_path))
    assert check_prepared(data.prepared.folder)["users"] == 30
    rows = log().rename(columns={"user": "request"}).assign(label=1)
    lists = ListsDataModule(rows, split="time", cache_dir=str(tmp_path))
    assert check_prepared(lists.prepared.folder)["train-rows"] > 0


def change(table: str, column: str, row: int, value: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        frame = pd.read_parquet(folder / f"{table}.parquet")
        frame.loc[row, column] = value
        frame.to_parquet(folder / f"{table}.parquet")

    return write


def without(table: str, column: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pd.read_parquet(folder / f"{table}.parquet").drop(columns=column).to_parquet(folder / f"{table}.parquet")

    return write


def no_facts(folder: Path) -> None:
    (folder / "facts.json").write_text(json.dumps({"users": 3}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("test-positives", "item", 2, 60), r"row 3 of .*test-positives: item is 60, and there are rows 0 to 59"),
        (change("train", "stop", 0, 10**6), r"train must have 0 <= start <= stop <= tied <= 360"),
        (change("val", "ends", 0, 9), r"'ends' of .*val must ascend to 30, the number of positives"),
        (change("users", "key", 1, 5), r"'key' of .*users must ascend, without repeated values"),
        (without("items", "count"), r"items.parquet has no column 'count'; it needs item_id, count"),
        (without("users", "ids"), r"'ids' of .*users must have 1 per row, as features/ describes, got 0"),
        (lambda folder: (folder / "val.parquet").unlink(), r"has no table 'val'"),
        (no_facts, r"facts.json has no 'interactions'; it needs"),
    ],
)  # fmt: skip
def test_check_names_what_is_wrong(written: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(written)
    with pytest.raises(ValueError, match=message) as raised:
        check_prepared(written)
    assert "\n" not in str(raised.value)
