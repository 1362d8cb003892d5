"""A small day of `simulate --preset large-day` has files that pickle and feather read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from pyarrow import feather

from recsys_topk.cli.main import main
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


def test_command_writes_a_day_and_names_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--preset", "large-day", "--out", str(tmp_path / "day"), "--requests", "20"]
    assert main([*command, "--users", "5"]) == 0
    assert f"fit --data.root {tmp_path / 'day'} --data.train_days {DAY}" in capsys.readouterr().out
    assert main([*command, "--days", "3"]) == 2
    assert "--preset large-day takes --requests, --users and --seed only" in capsys.readouterr().err
