"""`bench rehearsal` on a small day writes files that pickle and feather read, and measures every part."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import feather

from recsys_topk.bench import rehearsal
from recsys_topk.datamodules import RecFlowDataModule
from recsys_topk.datamodules.simulator.large_day import LargeDay, simulate_large_day

DAY = "2024-01-13"


def test_large_day_is_read_as_written(tmp_path: Path) -> None:
    config = LargeDay(requests=60, users=7, videos=2000, video_ids=5_000_000, authors=3_000_000)
    root = simulate_large_day(tmp_path / "large", config)
    stages = pickle.loads((root / "data" / "request_id_dict" / f"{DAY}.pkl").read_bytes())
    views = pickle.loads((root / "data" / "seq_effective_50_dict" / f"{DAY}.pkl").read_bytes())
    lists = {int(v) for groups in stages.values() for rows in groups.values() for v in rows[:, 0]}
    seen = {int(v) for rows in views.values() for v in rows[:, 0]}
    assert max(lists | seen) < config.video_ids
    assert len(lists | seen) == len({v * config.videos // config.video_ids for v in lists | seen})  # spread evenly
    assert feather.read_table(root / "data" / "all_stage" / f"{DAY}.feather").num_rows == len(
        {(request, int(v)) for request, groups in stages.items() for rows in groups.values() for v in rows[:, 0]}
    )
    data = RecFlowDataModule(str(root), train_days=DAY, val_days=DAY, test_days=DAY, cache_dir=str(tmp_path))
    data.prepare_data()
    assert data.schema.table("video_id").rows == 2 + len(lists | seen)  # compact, because ids go up to 5 million
    assert data.schema.table("user_id").rows == config.users + 2
    batch = next(iter(data.test_dataloader()))
    ids = sorted(lists | seen)
    for row, request in enumerate(batch.request_id.tolist()):
        listed = batch.items[batch.candidates[row], 0][batch.mask[row]] - 2
        wanted = np.concatenate(
            [stages[request][g][:, 0] for g in ("rank_pos", "rank_neg", "coarse_neg", "prerank_neg")]
        )
        assert [ids[i] for i in listed.tolist()] == wanted.tolist()
        assert [ids[i] for i in (batch.history[row, :, 0] - 2).tolist()] == views[request][:, 0].tolist()


def test_wrong_sizes_and_existing_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="100 videos or more within video_ids"):
        LargeDay(videos=100, video_ids=50)
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="choose another folder"):
        simulate_large_day(tmp_path / "there", LargeDay())


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(rehearsal, "in_own_process", here)
    parser = argparse.ArgumentParser()
    rehearsal.add_arguments(parser)
    sizes = ["--requests", "100", "--videos", "500", "--batch_size", "50", "--steps", "1", "--batches", "1"]
    result = rehearsal.run(parser.parse_args([*sizes, "--folder", str(tmp_path)]))
    parts = {str(row["part"]).split(",")[0]: row for row in result.rows}
    assert set(parts) == {"simulate", "prepare", "vocabularies", "train", "evaluate", "step"}
    for name in ("simulate", "prepare"):
        assert parts[name]["disk MB"] >= 0
        assert parts[name]["peak MB"] > 10
    assert parts["step"]["ratio"] == 1.0  # the last row is the baseline
