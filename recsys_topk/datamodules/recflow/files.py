"""The source files of RecFlow: their location, the id counts, and one day read as columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from recsys_topk.datamodules.recflow.all_stage import positions_of, read_all_stage
from recsys_topk.datamodules.recflow.days import clock_ids
from recsys_topk.datamodules.recflow.layout import CLOCK, ITEM_IDS, ORDERED_STAGES, REQUEST_IDS
from recsys_topk.datamodules.recflow.pickles import FormatError, load_pickle, no_collection
from recsys_topk.datamodules.recflow.request_pickles import check_ids, narrow, read_histories, read_stages
from recsys_topk.tabular.locations import AnyPath, RemotePath, location
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.reader import file_format
from recsys_topk.types import Array


@dataclass(frozen=True)
class DayColumns:
    """One day as columns, with ids of the embedding tables.

    Attributes:
        requests: `request_id` (n,), the request features (n,), one (n, SLOTS) column per stage with row numbers of
            `items` (-1 = no item), one (n, SLOTS) column of positions per ordered stage, `history` (n, W) with row
            numbers of `views`, oldest first, and `history_length` (n,).
        items: The day's catalogue, sorted by `item_id`: the item features, and `count`, the number of slots with the
            item.
        views: The distinct rows of the histories.
    """

    requests: Mapping[str, Array]
    items: Mapping[str, Array]
    views: Mapping[str, Array]


class RecFlowFiles:
    """The folder of a RecFlow data set.

    Args:
        root: The folder that holds `all_stage`, or the one above it (then `data/all_stage`); a path, or a URL of a file
            system of fsspec.
    """

    def __init__(self, root: str | Path | RemotePath) -> None:
        given = location(root)
        self.folder: AnyPath = next((f for f in (given / "data", given) if (f / "all_stage").is_dir()), given)
        if not (self.folder / "all_stage").is_dir():
            if not (given.is_dir() or given.is_file()):
                raise FileNotFoundError(f"--data.root {str(given)!r} does not exist; give the folder of the data")
            if file_format(str(given)) is not None:
                raise FileNotFoundError(
                    f"{given} is a table and no RecFlow folder; add --data interactions (who did what, and when) or "
                    f"--data lists (logged lists of candidates)"
                )
            raise FileNotFoundError(
                f"{given} holds no RecFlow data: there is neither all_stage/ nor data/all_stage/ in it; point root at "
                f"the folder with all_stage, request_id_dict, seq_effective_50_dict and others, or leave it out to "
                f"use the simulated world"
            )

    @cached_property
    def days(self) -> tuple[str, ...]:
        """The days of `all_stage`, in order."""
        stems = (path.stem for path in (self.folder / "all_stage").glob("*.feather"))
        found = tuple(sorted(stem for stem in stems if re.fullmatch(r"\d{4}-\d{2}-\d{2}", stem)))
        if not found:
            raise FileNotFoundError(f"{self.folder / 'all_stage'} holds no file named YYYY-MM-DD.feather")
        return found

    @cached_property
    def counts(self) -> dict[str, int]:
        """Distinct ids by field, from `others/id_cnt.pkl`."""
        return read_counts(self.folder / "others" / "id_cnt.pkl")

    def paths(self, day: str) -> dict[str, AnyPath]:
        """Return the three files of a day. Raise with the names of missing files if there are any."""
        files = {
            "all_stage": self.folder / "all_stage" / f"{day}.feather",
            "request_id_dict": self.folder / "request_id_dict" / f"{day}.pkl",
            "seq_effective_50_dict": self.folder / "seq_effective_50_dict" / f"{day}.pkl",
        }
        missing = [str(path) for path in files.values() if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"day {day} is not complete: {' and '.join(missing)} missing; each day has 3 files")
        return files

    def read(self, day: str) -> DayColumns:
        """Read one day."""
        with no_collection():
            return read_day(self.paths(day), self.counts)


def read_counts(path: AnyPath) -> dict[str, int]:
    """Read `id_cnt.pkl` and return the counts by feature name, for either spelling in the file.

    The item is called photo_id or video_id (photo_id is preferred, as in the reference). Spaces around keys are
    ignored.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; it holds the number of ids of every field")
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} must hold a dict from field to number of ids, got {type(content).__name__}")
    stripped = {str(key).strip(): value for key, value in content.items()}
    if "photo_id" in stripped:
        stripped["video_id"] = stripped["photo_id"]
    missing = [field for field in (*REQUEST_IDS, *ITEM_IDS) if field not in stripped]
    if missing:
        raise FormatError(f"{path} has no count for {', '.join(missing)}; it has {', '.join(sorted(stripped))}")
    return {field: int(stripped[field]) for field in (*REQUEST_IDS, *ITEM_IDS)}


def read_day(paths: Mapping[str, AnyPath], counts: Mapping[str, int]) -> DayColumns:
    """Read the three files of a day as columns.

    Args:
        paths: The files, by folder name.
        counts: Distinct ids by field.

    Raises:
        FormatError: A file is damaged, a request is missing in one of them, or an id exceeds its count. The message
            names the file and the request.
    """
    feather = paths["all_stage"]
    table, ordered, keys = read_all_stage(feather)
    request_id = table["request_id"]
    for field in REQUEST_IDS:
        check_ids(table[field], field, counts, request_id, feather)
    stages, items = read_stages(paths["request_id_dict"], request_id, counts, keys)
    histories, views = read_histories(paths["seq_effective_50_dict"], request_id, counts)
    requests = {
        "request_id": request_id,
        **dict(zip(CLOCK, clock_ids(table["request_timestamp"] // 1000).T, strict=True)),
        **{field: narrow(table[field] + 1, counts[field] + 1) for field in REQUEST_IDS},
        **stages,
        **histories,
    }
    video = items["item_id"] % VARIANT
    for stage, column in ORDERED_STAGES.items():
        requests[column] = positions_of(feather, stage, request_id, stages[stage], video, ordered.get(stage))
    return DayColumns(requests, items, views)
