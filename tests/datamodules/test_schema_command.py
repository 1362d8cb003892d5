"""`recsys-topk schema` describes logged lists and writes a config that trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from recsys_topk.datamodules.lists.datamodule import ListsDataModule
from recsys_topk.datamodules.lists.guess import guess_lists, looks_like_lists
from tests.conftest import Result
from tests.datamodules.test_lists import funnel

SMALL = ("--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false")


def nested(rows: list[dict[str, Any]]) -> pa.Table:
    """Return one row per request, with lists in the item columns."""
    requests: dict[str, dict[str, Any]] = {}
    for row in rows:
        made = requests.setdefault(
            row["request_id"], {name: row[name] for name in ("request_id", "user_id", "device", "timestamp")}
        )
        made["timestamp"] = min(made["timestamp"], row["timestamp"])
        for name in ("item_id", "stage", "position", "price"):
            made.setdefault(name, []).append(row[name])
    return pa.Table.from_pylist(list(requests.values()))


def test_funnel_log_is_described_and_trains(
    tmp_path: Path, in_process: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{name: value for name, value in row.items() if name != "history"} for row in funnel(90)]
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "log.csv")
    done = in_process(tmp_path, "schema", "log.csv", "--out", "lists.yaml")
    assert done.returncode == 0, done.stderr
    assert "lists; columns: request = request_id, user = user_id, item = item_id, stage = stage" in done.stdout
    assert "the order of the stages, best first, is a guess" in done.stdout
    assert "fit --config lists.yaml" in done.stdout
    written = yaml.safe_load((tmp_path / "lists.yaml").read_text())["data"]["init_args"]
    assert written["labels"] == {"shown": "10 - position", "ranked": 1, "recalled": 0}
    assert written["features"]["context"] == {"device": {"kind": "categorical"}}
    fitted = in_process(tmp_path, "fit", "--config", "lists.yaml", "--model.k", "2", *SMALL)
    assert fitted.returncode == 0, fitted.stderr
    first, last = map(int, re.findall(r"retrieval \(two_tower, (\d+)\) -> ranking \(mlp, (\d+)\)", fitted.stdout)[0])
    assert last <= first < 20  # a half and a quarter of short lists


def test_description_of_nested_tables_and_svmlight_files_matches_the_data_module(tmp_path: Path) -> None:
    (tmp_path / "letor").mkdir()
    for name in ("train", "test"):
        lines = [f"{n % 3} qid:{n // 4} 1:{n * 0.5} {2 + n % 2}:1" for n in range(40)]
        (tmp_path / "letor" / f"set.{name}").write_text("\n".join(lines) + "\n")
    pq.write_table(nested(funnel()), tmp_path / "nested.parquet")
    for source in ("letor", "nested.parquet"):
        assert looks_like_lists([str(tmp_path / source)], {})
        found, config = guess_lists([str(tmp_path / source)], {})
        options = config["data"]["init_args"]
        by_hand = {"labels": options["labels"]} if "labels" in options else {}
        own, guessed = (
            ListsDataModule(cache_dir=str(tmp_path / "cache"), **given)
            for given in (options, {"root": str(tmp_path / source), **by_hand})
        )
        assert own.schema == guessed.schema
        assert own.prepared.facts == guessed.prepared.facts
        assert list(found.guesses) == (["items"] if source == "letor" else ["context", "items"])


@pytest.mark.parametrize(
    ("columns", "given", "lists"),
    [
        ({"user_id": [1], "item_id": [2], "rating": [3], "timestamp": [4]}, {}, False),
        ({"session_id": [1], "item_id": [2], "rating": [3]}, {}, False),  # a session is the user of interactions
        ({"session_id": [1], "item_id": [2], "rating": [3]}, {"label": "rating"}, True),
        ({"query": [1], "doc": [2], "relevance": [3]}, {}, True),
        ({"impression_id": [1], "item_id": [2], "stage": ["shown"]}, {}, True),
        ({"impression_id": [1], "item_id": [2]}, {}, False),
    ],
)
def test_lists_are_distinguished_from_interactions(
    tmp_path: Path, columns: dict[str, Any], given: dict[str, str | None], lists: bool
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    assert looks_like_lists([str(tmp_path / "table.parquet")], given) is lists


@pytest.mark.parametrize(
    ("stages", "positions", "labels"),
    [
        # known funnel names, for any numbers of rows
        (["rank_neg", "coarse_neg", "prerank_neg", "rank_pos"], None,
         ["rank_pos", "rank_neg", "coarse_neg", "prerank_neg"]),
        (["recalled", "clicked", "shown", "shown"], None, ["clicked", "shown", "recalled"]),
        # numbers
        ([0, 2, 1, 1], None, ["2", "1", "0"]),
        # unknown names: stages with positions first, then those with fewest rows
        (["a", "b", "b", "c", "c", "c"], [None, 1, 2, None, None, None], ["b", "a", "c"]),
    ],
)  # fmt: skip
def test_stages_are_ordered_best_first(
    tmp_path: Path, stages: list[Any], positions: list[int | None] | None, labels: list[str]
) -> None:
    columns = {"request": [1] * len(stages), "item": list(range(len(stages))), "stage": stages}
    if positions is not None:
        columns["position"] = positions
    pq.write_table(pa.table(columns), tmp_path / "table.parquet")
    _, config = guess_lists([str(tmp_path / "table.parquet")], {})
    found = config["data"]["init_args"]["labels"]
    assert list(found) == labels
    expected = list(range(len(labels)))[::-1]
    assert list(found.values()) == ([("10 - position"), *expected[1:]] if positions else expected)


def test_column_of_many_values_is_not_a_stage(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"request": [1] * 30, "item": range(30), "stage": [f"s{n}" for n in range(30)]}),
        tmp_path / "t.parquet",
    )
    with pytest.raises(ValueError, match="'stage' has 30 different values in 30 rows, too many for stages"):
        guess_lists([str(tmp_path / "t.parquet")], {})
