"""Invalid logged lists raise a one-line error and leave no partial files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_topk.datamodules.lists.datamodule import ListsDataModule

GOOD: dict[str, list[Any]] = {
    "request": [1, 1, 2, 2, 3, 3],
    "item": ["a", "b", "a", "c", "b", "c"],
    "label": [1.0, 0.0, 2.0, 0.0, 1.0, 0.0],
    "price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "split": ["train", "train", "val", "val", "test", "test"],
}


def changed(**columns: Any) -> dict[str, list[Any]]:
    """Return the valid table with some columns replaced, or removed if None."""
    return {name: column for name, column in {**GOOD, **columns}.items() if column is not None}


STAGE = {"label": None, "stage": ["shown", "old", "shown", "ranked", "shown", "ranked"]}
POSITION = {"position": [1, None, 26, None, 1, None]}
MISTAKES: dict[str, tuple[dict[str, list[Any]], dict[str, Any], str]] = {
    "no request": (changed(request=None, key=GOOD["request"]), {}, r"no column that looks like the request.*has: item"),
    "no label": (changed(label=None), {}, r"like the label; .*--data.label COLUMN, or map stages .*--data.labels"),
    "misnamed column": (GOOD, {"item": "itm"}, r"has no column 'itm'; did you mean 'item'"),
    "NaN label": (changed(label=[1.0, float("nan"), 2.0, 0.0, 1.0, 0.0]), {}, r"is missing .* row 2 \(rows .*: 1\)"),
    "negative label": (changed(label=[1, 0, 2, -3, 1, 0]), {}, r"'label' is -3 in row 4 .*finite and >= 0"),
    "text label": (changed(label=["good", "bad"] * 3), {}, r"'label' must have numbers.*labels must be numbers"),
    "empty request": (changed(request=[1, 1, None, 2, 3, 3]), {}, r"row 3: column 'request' has no value"),
    "empty item": (changed(item=["a", None, "a", "c", "b", "c"]), {}, r"row 2: column 'item' has no value"),
    "duplicate": (changed(item=["a", "a", "a", "c", "b", "c"]), {}, r"request 1 has the item 'a' more than .*best"),
    "two splits": (changed(split=["train", "test", "val", "val", "test", "test"]), {}, r"1 is in train and test"),
    "unknown split": (changed(split=["train", "tr"] * 3), {}, r"'split' must say train, val or test .* got 'tr'"),
    "empty split": (changed(split=["train"] * 4 + ["val"] * 2), {}, r"the test split has no lists \(3 in all\)"),
    "unknown stage": (changed(**STAGE), {"labels": {"shown": 2, "ranked": 1}}, r"'stage' has 'old' .*\{old: null\}"),
    "all left out": (
        changed(label=None, stage=["old"] * 6), {"labels": {"shown": 2, "old": None}}, r"can be used: labels maps"
    ),
    "no position": (changed(**STAGE), {"labels": {"shown": "9 - position"}}, r"looks like the position"),
    "position too large": (
        changed(**STAGE, **POSITION),
        {"labels": {"shown": "30 - position", "ranked": 7, "old": None}},
        r"'position' is 26 for an item of stage 'shown', so its label 30 - position is not above 7",
    ),
    "labels out of order": (GOOD, {"labels": {"ranked": 7, "shown": 9}}, r"best stage first: 'ranked' has 7, .* has 9"),
    "label that is no label": (GOOD, {"labels": {"shown": "7 + position"}}, r"stage 'shown' to '7 \+ position'"),
    "label and labels": (changed(stage=["s"] * 6), {"label": "label", "labels": {"s": 1}}, r"exclude each other"),
    "stage without labels": (changed(stage=["s"] * 6), {"stage": "stage"}, r"--data.stage needs --data.labels"),
    "nothing tells items apart": (
        {name: GOOD[name] for name in ("request", "label", "split")}, {}, r"has no feature of items"
    ),
    "text among numbers": (
        changed(price=["1", "2", "x", "4", "5", "6"]), {"features": {"items": {"price": "numeric"}}},
        r"column 'price' must have numbers.*describe it as categorical",
    ),
    "history of prices": (
        changed(history=[["a"]] * 6), {"features": {"items": ["item", "price"], "history": ["price"]}},
        r"remove 'price' from the history",
    ),
    "label as a feature": (GOOD, {"features": {"items": {"label": "numeric"}}}, r"'label' is the label, .*remove it"),
    "no history": (GOOD, {"features": {"items": ["item"], "history": ["item"]}}, r"--data.history COLUMN"),
    "time without column": (changed(split=None), {"split": "time"}, r"split='time' needs --data.time COLUMN"),
    "empty lists": (
        {"request": [1, 2], "item": pa.array([[], []], pa.list_(pa.int64())), "label": [[], []]}, {},
        r"no rows that can be used: all lists are empty",
    ),
    "ms among s": (
        changed(split=None, time=[1600000000, 1600000001, 1600000002000] * 2), {}, r"'time' mixes units: .*1600000000"
    ),
    "no rows": ({name: [] for name in GOOD}, {}, r"has no rows"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_raises_one_line_and_leaves_no_files(tmp_path: Path, mistake: str) -> None:
    columns, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as caught:
        ListsDataModule(pa.table(columns), cache_dir=str(tmp_path / "cache"), **options).prepare_data()
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "cache").rglob("*") if not path.name.endswith(".lock")] == []


def test_single_items_empty_lists_and_missing_numbers_are_allowed(tmp_path: Path) -> None:
    nested = pa.table({
        "request": [1, 2, 3, 4, 5], "split": ["train", "train", "val", "test", "test"],
        "item": [["a", "b"], [], ["a"], ["c", "a"], None], "label": [[1.0, 0.0], [], [1.0], [0.0, 1.0], None],
        "price": [[1.0, None], [], [2.0], [float("nan"), 3.0], None],
    })  # fmt: skip
    data = ListsDataModule(nested, cache_dir=str(tmp_path))
    assert {split: len(data.shard(split)) for split in ("train", "val", "test")} == {"train": 1, "val": 1, "test": 1}
    (batch,) = data.loader(["test"], training=False)
    assert [feature.name for feature in data.schema.items] == ["item", "price", "price_missing"]
    assert batch.item_values[batch.candidates[0], 1].tolist() == [1.0, 0.0]
    assert "1 lists with one item" in data.facts()


def damaged_parquet(folder: Path) -> Path:
    pq.write_table(pa.table(GOOD), folder / "log.parquet")
    content = (folder / "log.parquet").read_bytes()
    (folder / "log.parquet").write_bytes(content[: len(content) // 2])
    return folder / "log.parquet"


def text_file(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


LINES = "1 qid:1 1:2\n0 qid:1 2:1\n"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (damaged_parquet, r"log.parquet cannot be read.*write it again"),
        (
            text_file("a.svm", LINES + "0 qid:2 2:1 x\n"),
            r"a.svm, line 3: a number without an index.*got '0 qid:2 2:1 x'",
        ),
        (text_file("a.svm", LINES + "0 qid:2 2:abc\n"), r"a.svm, line 3: a value that is not a number; .*abc"),
        (text_file("a.svm", LINES + "\n0 qid:q7 2:1\n"), r"a.svm, line 4: qid:q7 is not an integer"),
        (text_file("a.svm", LINES + "nan qid:2 2:1\n"), r"a.svm, line 3: NaN or infinity"),
        (text_file("a.svm", LINES + "1 qid:2 0:1\n"), r"a.svm, line 3: feature indices must be integers from 1"),
        (text_file("a.svm", LINES + "1 qid:2 2:1 2:3\n"), r"a.svm, line 3: a feature index occurs twice"),
        (text_file("a.svm", LINES + "1 2:1\n"), r"a.svm, row 3: it has no qid:"),
        (text_file("a.svm", "1 1:2\n0 2:1\n"), r"a.svm has no qid: and there is no .*a.svm.query"),
        (text_file("log.csv", "request,item,label\n1,2\n"), r"log.csv cannot be read"),
        (text_file("log.csv", "request,item,label\n"), r"log.csv has no rows"),
    ],
)
def test_errors_for_damaged_files_name_the_file(tmp_path: Path, write: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ListsDataModule(str(write(tmp_path)), cache_dir=str(tmp_path / "cache")).prepare_data()
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "cache").rglob("*") if not path.name.endswith(".lock")] == []


def test_lengths_of_lists_must_match_the_rows(tmp_path: Path) -> None:
    path = text_file("rank.train", "1 1:2\n0 2:1\n1 2:2\n")(tmp_path)
    for lengths, message in (("2", "lengths for 2 rows, and .* has more"), ("2\n2", "lengths for 4 rows, and .* has 3"),
                             ("2 x", "one integer per line; got 'x'")):  # fmt: skip
        text_file("rank.train.query", lengths)(tmp_path)
        with pytest.raises(ValueError, match=message):
            ListsDataModule(str(path), cache_dir=str(tmp_path / "cache")).prepare_data()
