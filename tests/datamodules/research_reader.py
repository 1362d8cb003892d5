"""An independent RecFlow reader in plain Python that reads one request at a time.

It was written from the description of the format and follows the style of research code: a dictionary of positions per
day, and items built one by one with three clock conversions each. Times are in UTC+8, so that its output can be
compared with that of the toolkit.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch.utils.data import Dataset

GROUPS: Final = ("rank_pos", "rank_neg", "coarse_neg", "prerank_neg")
_RAW: Final = {"rank_neg": 23, "coarse_neg": 24, "prerank_neg": 25}
_SAMPLE: Final = ("request_id", "user_id", "request_timestamp", "device_id", "age", "gender", "province")


def _clock(seconds: int) -> tuple[int, int, int]:
    local = seconds + 8 * 3600
    return time.gmtime(local).tm_wday + 1, time.gmtime(local).tm_hour + 1, time.gmtime(local).tm_min + 1


class ResearchDataset(Dataset[tuple[Any, ...]]):
    """A day of two-stage samples: context, history, four groups of items, their masks and labels.

    The `data` folder must be trusted, because its pickles are opened with `pickle`.
    """

    def __init__(self, folder: Path, day: str) -> None:
        from pyarrow import feather

        table = feather.read_table(folder / "all_stage" / f"{day}.feather").to_pydict()
        self.samples = list(dict.fromkeys(zip(*(table[name] for name in _SAMPLE), strict=True)))
        self.positions: dict[tuple[int, int], list[int]] = {}
        for request, video, flag, index in zip(
            table["request_id"], table["video_id"], table["rank_pos"], table["rank_index"], strict=True
        ):
            if flag == 1:
                self.positions.setdefault((request, video), []).append(index)
        with (folder / "request_id_dict" / f"{day}.pkl").open("rb") as file:
            self.stages = pickle.load(file)
        with (folder / "seq_effective_50_dict" / f"{day}.pkl").open("rb") as file:
            self.histories = pickle.load(file)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        request, user, timestamp, device, age, gender, province = self.samples[number]
        context = [*_clock(timestamp // 1000), user + 1, device + 1, gender + 1, age + 1, province + 1]
        history = self.histories[request][:, :5].copy()
        viewed = self.histories[request][:, 7] > 0
        length = int(viewed.sum())
        for column in (0, 1, 2, 4):
            history[50 - length :, column] += 1
        items, masks, labels = [], [], []
        for group in GROUPS:
            rows = np.tile(np.array([0, 0, 0, 2, 0, 0, 0, 0]), (10, 1))
            mask, label = np.zeros(10, dtype=np.int8), np.full(10, 30 - _RAW.get(group, 0))
            stored = self.stages[request].get(group)
            for slot, item in enumerate(stored[:10] if stored is not None else ()):
                clock = _clock(int(item[5]))
                rows[slot] = [item[0] + 1, item[1] + 1, item[3] + 1, item[6], item[4] + 1, *clock]
                mask[slot] = 1
                if group == "rank_pos":
                    label[slot] = 30 - self.positions[request, int(item[0])][0]
            items.append(rows)
            masks.append(mask)
            labels.append(label)
        return (request, np.array(context), history, viewed, max(length, 1), *items, *masks, *labels)
