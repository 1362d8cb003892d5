"""Damaged data raises one error that names file and request, and leaves no partial files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import HandMade

from recsys_topk.datamodules.recflow.cache import DayCache
from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.recflow.pickles import FormatError

DAY = "2024-01-13"


class Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def assert_prepare_fails(made: HandMade, tmp_path: Path, match: str, error: type[Exception] = FormatError) -> None:
    files = RecFlowFiles(made.folder)
    cache = DayCache(files, tmp_path / "prepared")
    with pytest.raises(error, match=match):
        cache.prepare([DAY])
    left = [path for path in (tmp_path / "prepared").rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == []


Change = Callable[[HandMade], None]


def set_stage(stage: str, column: int, value: int) -> Change:
    def change(made: HandMade) -> None:
        made.stages[501][stage][0, column] = value

    return change


def set_view(column: int, value: int) -> Change:
    def change(made: HandMade) -> None:
        made.histories[500][49, column] = value

    return change


def set_row(name: str, value: int) -> Change:
    def change(made: HandMade) -> None:
        for row in made.rows:
            if row["request_id"] == 501:
                row[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_stage("rank_neg", 0, 100), r"request_id_dict.*13\.pkl, request 501: video_id is 100, .* admits 0\.\.99"),
        (set_stage("prerank_neg", 1, -1), r"request_id_dict.*, request 501: author_id is -1"),
        (set_stage("coarse_neg", 6, 8), r"request 501: category_level_one is 8, .* admits 0\.\.7"),
        (set_view(2, 20), r"seq_effective_50_dict.*, request 500: category_level_two is 20"),
        (set_row("user_id", 10), r"all_stage.*feather, request 501: user_id is 10, .* admits 0\.\.9"),
        (set_row("province", -1), r"all_stage.*, request 501: province is -1"),
        (lambda made: made.stages.pop(501), r"request_id_dict.*13\.pkl lacks request 501 .*\(1 of 2 are missing\)"),
        (lambda made: made.histories.pop(500), r"seq_effective_50_dict.*13\.pkl lacks request 500"),
        (
            lambda made: made.rows.remove(made.row(500, 10)),
            r"request_id_dict.*, request 500: 1 of \d+ rows differ from all_stage; one of the files is damaged",
        ),
        (
            lambda made: made.row(500, 10).update(rank_pos=0),
            r"all_stage.*, request 500: no row with rank_pos = 1 for video 10, which request_id_dict lists",
        ),
        (set_row("rank_index", 23), r"all_stage.*, request 501: rank_index is 23; .*0\.\.21"),
        (lambda made: made.stages.update({500: {}, 501: {}}), r"request_id_dict.*13\.pkl has no item in any stage"),
        (lambda made: made.stages.update({501: 5}), r"request_id_dict.*, request 501: expected a dict"),
        (lambda made: made.stages[501].update(rank_neg=[1]), r"request_id_dict.*, request 501: .*got list"),
        (
            lambda made: made.stages[501].update(rank_neg=np.zeros((2, 7), np.int64)),
            r"request_id_dict.*, request 501: expected an integer array \(n, 8\), got int64 \(2, 7\)",
        ),
        (
            lambda made: made.histories.update({501: np.zeros((50, 10))}),
            r"seq_effective.*, request 501: expected an integer array \(n, 10\), got float64 \(50, 10\)",
        ),
    ],
)
def test_error_for_inconsistent_content_names_file_and_request(
    hand_made: HandMade, tmp_path: Path, change: Change, match: str
) -> None:
    change(hand_made)
    hand_made.write()
    assert_prepare_fails(hand_made, tmp_path, match)


@pytest.mark.parametrize("keep", [0, 10, 0.5, -8])
def test_error_for_truncated_feather_names_the_file(hand_made: HandMade, tmp_path: Path, keep: float) -> None:
    hand_made.write()
    path = hand_made.folder / "data" / "all_stage" / f"{DAY}.feather"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert_prepare_fails(hand_made, tmp_path, r"all_stage.*2024-01-13\.feather is not a whole feather file")


@pytest.mark.parametrize("folder", ["request_id_dict", "seq_effective_50_dict"])
def test_error_for_truncated_pickle_names_the_file(hand_made: HandMade, tmp_path: Path, folder: str) -> None:
    hand_made.write()
    path = hand_made.folder / "data" / folder / f"{DAY}.pkl"
    path.write_bytes(path.read_bytes()[:-100])
    assert_prepare_fails(hand_made, tmp_path, rf"{folder}.*is not a whole pickle")


@pytest.mark.parametrize("folder", ["request_id_dict", "seq_effective_50_dict"])
def test_hostile_pickle_cannot_run_code(hand_made: HandMade, tmp_path: Path, folder: str) -> None:
    hand_made.write()
    marker = tmp_path / "ran"
    path = hand_made.folder / "data" / folder / f"{DAY}.pkl"
    path.write_bytes(pickle.dumps({500: Command(f"touch {marker}")}))
    assert_prepare_fails(hand_made, tmp_path, rf"{folder}.*asks for (posix|nt)\.system")
    assert not marker.exists()


@pytest.mark.parametrize("folder", ["request_id_dict", "seq_effective_50_dict"])
def test_error_for_missing_file_of_a_day_names_it(hand_made: HandMade, tmp_path: Path, folder: str) -> None:
    hand_made.write()
    (hand_made.folder / "data" / folder / f"{DAY}.pkl").unlink()
    assert_prepare_fails(
        hand_made, tmp_path, rf"day 2024-01-13 is not complete: .*{folder}.* missing", FileNotFoundError
    )


def test_errors_name_missing_columns_counts_and_folders(hand_made: HandMade, tmp_path: Path) -> None:
    for row in hand_made.rows:
        del row["province"]
    hand_made.write()
    assert_prepare_fails(hand_made, tmp_path, r"feather has no column province; it has age, ")
    del hand_made.counts["age"]
    hand_made.pickle(hand_made.folder / "data" / "others" / "id_cnt.pkl", hand_made.counts)
    with pytest.raises(FormatError, match=r"id_cnt\.pkl has no count for age"):
        _ = RecFlowFiles(hand_made.folder).counts
    (hand_made.folder / "data" / "others" / "id_cnt.pkl").unlink()
    with pytest.raises(FileNotFoundError, match=r"id_cnt\.pkl is missing"):
        _ = RecFlowFiles(hand_made.folder).counts
    with pytest.raises(FileNotFoundError, match=r"nowhere' does not exist; give the folder of the data"):
        RecFlowFiles(tmp_path / "nowhere")


def test_float_column_raises(hand_made: HandMade, tmp_path: Path) -> None:
    hand_made.rows[0]["rank_index"] = 1.5  # type: ignore[assignment]
    hand_made.write()
    assert_prepare_fails(hand_made, tmp_path, r"column rank_index must hold integers without gaps, it is double")


def test_days_prepared_before_a_damaged_day_are_kept(hand_made: HandMade, tmp_path: Path) -> None:
    hand_made.write(DAY)
    hand_made.stages.pop(501)
    hand_made.write("2024-01-14")
    files = RecFlowFiles(hand_made.folder)
    hand_made.stages[501] = {}
    cache = DayCache(files, tmp_path / "prepared")
    with pytest.raises(FormatError, match="2024-01-14"):
        cache.prepare(files.days)
    assert cache.missing(files.days) == ["2024-01-14"]
