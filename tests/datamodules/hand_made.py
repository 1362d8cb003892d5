"""Test data: a day of RecFlow written by hand, independent of the simulator, and a small world."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import feather

from recsys_topk.datamodules.recflow.files import RecFlowFiles
from recsys_topk.datamodules.simulator.world import WorldConfig

DAY = "2024-01-13"
SMALL = WorldConfig(users=60, items=400, days=4, requests=150, seed=3)
"""The simulated world that the tests share."""


@dataclass
class HandMade:
    """A day in RecFlow's format. Tests change it before it is written."""

    folder: Path
    counts: dict[str, int] = field(
        default_factory=lambda: {
            "user_id": 10,
            "device_id": 10,
            "gender": 3,
            "age": 8,
            "province": 31,
            "video_id": 100,
            "author_id": 50,
            "category_level_two": 20,
            "category_level_one": 6,
            "upload_type": 4,
        }
    )
    rows: list[dict[str, int]] = field(default_factory=list)
    stages: dict[int, dict[str, Any]] = field(default_factory=dict)
    histories: dict[int, Any] = field(default_factory=dict)
    protocol: int = 4

    def item(self, video: int) -> dict[str, int]:
        return {
            "video_id": video,
            "author_id": video % 50,
            "category_level_two": video % 20,
            "category_level_one": video % 6,
            "upload_type": video % 4,
            "upload_timestamp": 1705000000 + 3600 * video,
            "duration": 1000 + video,
        }

    def stage_row(self, video: int) -> list[int]:
        i = self.item(video)
        names = ("video_id", "author_id", "duration", "category_level_two", "upload_type", "upload_timestamp")
        return [*(i[name] for name in names), i["category_level_one"], 0]

    def view_row(self, video: int, when: int) -> list[int]:
        i = self.item(video)
        return [video, i["author_id"], i["category_level_two"], i["category_level_one"], i["upload_type"],
                i["upload_timestamp"], i["duration"], when, 7, 99]  # fmt: skip

    def request(self, request: int, user: int, groups: dict[str, list[int]], history: Sequence[int] = ()) -> None:
        sample = {
            "request_id": request,
            "user_id": user,
            "request_timestamp": 1705118400123 + request,
            "device_id": user,
            "age": 2,
            "gender": 1,
            "province": 30,
        }
        for video in dict.fromkeys(v for videos in groups.values() for v in videos):
            row = {**sample, **self.item(video)}
            for stage, index in (("rank_pos", "rank_index"), ("rerank_pos", "rerank_index")):
                videos = groups.get(stage, [])
                row[stage], row[index] = int(video in videos), videos.index(video) + 1 if video in videos else 0
            self.rows.append(row)
        self.stages[request] = {
            stage: np.array([self.stage_row(v) for v in videos], dtype=np.int64).reshape(-1, 8)
            for stage, videos in groups.items()
        }
        views = np.zeros((50, 10), dtype=np.int64)
        for place, video in enumerate(reversed(history)):
            views[49 - place] = self.view_row(video, 1705000000000 - place)
        self.histories[request] = views

    def row(self, request: int, video: int) -> dict[str, int]:
        """Return the row of all_stage."""
        return next(row for row in self.rows if (row["request_id"], row["video_id"]) == (request, video))

    def write(self, day: str = DAY) -> RecFlowFiles:
        data = self.folder / "data"
        for name in ("all_stage", "request_id_dict", "seq_effective_50_dict", "others"):
            (data / name).mkdir(parents=True, exist_ok=True)
        table = pa.table({name: [row[name] for row in self.rows] for name in self.rows[0]})
        feather.write_feather(table, data / "all_stage" / f"{day}.feather")
        self.pickle(data / "request_id_dict" / f"{day}.pkl", self.stages)
        self.pickle(data / "seq_effective_50_dict" / f"{day}.pkl", self.histories)
        self.pickle(data / "others" / "id_cnt.pkl", self.counts)
        return RecFlowFiles(self.folder)

    def pickle(self, path: Path, content: Any) -> None:
        path.write_bytes(pickle.dumps(content, protocol=self.protocol))
