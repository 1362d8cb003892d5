"""Prepare logged lists as memory-mapped Arrow files: read once, group by request part by part, in bounded memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.arrow_files import write_columns, write_ids
from recsys_topk.datamodules.columns import keys_of, lists_of, one_chunk
from recsys_topk.datamodules.encoding import Encoded, FeatureEncoder
from recsys_topk.datamodules.features import DataPart
from recsys_topk.datamodules.fitting import FeatureFitter
from recsys_topk.datamodules.growing import GrowingColumns
from recsys_topk.datamodules.lists.catalogue import ItemTable
from recsys_topk.datamodules.lists.grouping import Grouped, group_rows
from recsys_topk.datamodules.lists.parts import RowParts
from recsys_topk.datamodules.lists.plan import SPLITS, Plan
from recsys_topk.datamodules.lists.rows import RowReader
from recsys_topk.datamodules.progress import Progress
from recsys_topk.datamodules.schema import VARIANT
from recsys_topk.files import write_whole

Array = npt.NDArray[Any]

FORMAT: Final = 2
"""Version of the prepared files. Increase it if their content changes, so that older files are not read."""

_ROWS: Final = 1 << 15


class Preparation:
    """Makes the prepared files of a plan in a folder.

    Memory: the rows of one part, the requests, and 16 bytes per distinct item.

    Args:
        plan: What to prepare.
        folder: An empty folder.
        progress: Receives the progress.
    """

    def __init__(self, plan: Plan, folder: Path, progress: Progress) -> None:
        self.plan, self.folder, self.progress = plan, folder, progress
        self.work = folder / "work"
        self.work.mkdir()
        self._grown = GrowingColumns(self.work)
        self._parts = RowParts(self.work, "__request", plan.in_memory)
        self._reader = RowReader(plan)
        self._items = {split: ItemTable(self._grown, f"{split}-items") for split in SPLITS}
        self._names: dict[str, list[str]] = {split: [] for split in SPLITS}
        self._users: dict[str, list[Any]] = {split: [] for split in SPLITS}
        self._counts: dict[str, int] = {}

    def run(self) -> None:
        """Run all steps of the preparation."""
        for batch in self._reader.batches(self.progress):
            self._parts.add(batch)
        self._parts.close()
        if not self._parts.rows:
            raise ValueError(f"{self.plan.name} has no rows that can be used; labels leaves all of them out")
        self._cuts = self._find_cuts()
        encoder = self._fit()
        encoder.save(self.folder / "features")
        for table, grouped in self._grouped():
            for number, split in enumerate(SPLITS):
                for requests in grouped.chunks(number, _ROWS):
                    self._encode(encoder, split, table, grouped, requests)
            self.progress("encode", table.num_rows, self._parts.rows)
        self._write(encoder)
        counts = {
            "rows": self._parts.rows,
            "requests": {split: self._grown.length(f"{split}.request_id") for split in SPLITS},
            "items": {split: len(self._items[split]) for split in SPLITS},
            "counts": self._counts,
        }
        self._grown.close()
        shutil.rmtree(self.work)
        write_whole(self.folder / "facts.json", json.dumps({"format": FORMAT, **counts}, indent=1) + "\n")

    def _find_cuts(self) -> tuple[int, int] | None:
        """Return the times at which validation and testing begin; None = requests are not split by time."""
        if self.plan.split != "time":
            return None
        if self.plan.dates is not None:
            return self.plan.dates
        times = []
        for table in self._parts.tables(("__request", "__split", "__time")):
            request, split, time = (np.asarray(one_chunk(table.column(name))) for name in table.column_names)
            order = np.lexsort((time, request))
            first = np.r_[True, request[order][1:] != request[order][:-1]] & (split[order] < 0)
            times.append(time[order][first])
        ordered = np.sort(np.concatenate(times))
        val, test = self.plan.fractions

        def newest(share: float) -> int:  # share 0: the split has a separate table
            at = min(int((1 - share) * ordered.size), ordered.size - 1)
            return int(ordered[at]) if share else np.iinfo(np.int64).max

        return newest(val + test), newest(test)

    def _grouped(self) -> Iterator[tuple[Any, Grouped]]:
        for table in self._parts.tables():
            yield table, group_rows(table, self.plan, self._cuts, self._reader.item_name)

    def _fit(self) -> FeatureEncoder:
        found = np.zeros(len(SPLITS), dtype=np.int64)
        fitter = FeatureFitter(self.plan.description)
        for table, grouped in self._grouped():
            found += np.bincount(grouped.split, minlength=len(SPLITS))
            for reason, number in grouped.counts.items():
                self._counts[reason] = self._counts.get(reason, 0) + number
            for requests in grouped.chunks(0, _ROWS):
                first, rows = grouped.first[requests], grouped.rows_of(requests)
                self._update(fitter, "user", table, first)
                self._update(fitter, "context", table, first)
                self._update(fitter, "items", table, rows)
                if self.plan.description.history:
                    views = self._views(table, first)
                    fitter.update("history", self._view_table(views))
            self.progress("fit", table.num_rows, self._parts.rows)
        for number, split in enumerate(SPLITS):
            if not found[number]:
                raise ValueError(f"the {split} split has no lists ({found.sum()} in all); {self.plan.advice}")
        return self.plan.features if isinstance(self.plan.features, FeatureEncoder) else fitter.finish()

    def _update(self, fitter: FeatureFitter, part: DataPart, table: Any, rows: Array) -> None:
        columns = self.plan.description.columns(part)
        if columns:
            fitter.update(part, table.select(columns).take(rows))

    def _encode(self, encoder: FeatureEncoder, split: str, table: Any, grouped: Grouped, requests: Array) -> None:
        grown, first, rows = self._grown, grouped.first[requests], grouped.rows_of(requests)
        described = self.plan.description
        columns = {name: np.asarray(one_chunk(table.column(f"__{name}"))) for name in ("item", "label", "group")}
        encoded = _encoded(encoder, "items", table, rows)
        keys, items = columns["item"][rows], self._items[split]
        numbers = items.add(keys, encoded) if "item" in self.plan.roles else items.append(keys, encoded)
        length = grouped.length[requests]
        start = grown.length(f"{split}-rows.label") + np.cumsum(length) - length
        grown.append(f"{split}-rows.item", numbers)
        grown.append(f"{split}-rows.label", columns["label"][rows])
        grown.append(f"{split}-rows.group", columns["group"][rows])
        made = [_encoded(encoder, "user", table, first), _encoded(encoder, "context", table, first)]
        request = {
            "request_id": grouped.request[requests],
            "start": start,
            "length": length,
            "order": grouped.order_key[requests],
            "row": np.asarray(one_chunk(table.column("__row")))[first],
            "time": np.asarray(one_chunk(table.column("__time")))[first],
            "ids": np.concatenate([part.ids for part in made], axis=1).astype(np.int32),
            "values": np.concatenate([part.values for part in made], axis=1),
        }
        if described.history:
            views = self._views(table, first)
            before = grown.length(f"{split}-views.ids")
            request["view_start"] = before + np.cumsum(views.length) - views.length
            request["view_length"] = views.length
            history = encoder.encode("history", self._view_table(views))
            grown.append(f"{split}-views.ids", history.ids.astype(np.int32))
            viewed = keys_of(views.values)
            grown.append(f"{split}-views.item", np.where(viewed.missing, -1, viewed.keys))
        for name, column in request.items():
            grown.append(f"{split}.{name}", column)
        if "__name" in table.column_names:
            self._names[split] += one_chunk(table.column("__name")).take(first).to_pylist()
        if "user" in self.plan.roles:
            self._users[split] += one_chunk(table.column(self.plan.roles["user"])).take(first).to_pylist()

    def _views(self, table: Any, first: Array) -> Any:
        column = self.plan.roles["history"]
        return lists_of(one_chunk(table.column(column)).take(first), " ", column)

    def _view_table(self, views: Any) -> dict[str, Any]:
        return {self.plan.roles["item"]: views.values}

    def _write(self, encoder: FeatureEncoder) -> None:
        keys = {split: self._items[split].keys() for split in SPLITS}
        distinct = np.unique(np.concatenate([np.unique(own) for own in keys.values()]))
        plain = not self._reader.text_items and distinct[0] >= 0 and distinct[-1] < VARIANT
        if not plain:
            names = [self._reader.item_name(key) for key in distinct.tolist()]
            write_ids(self.folder / "item-ids.arrow", names)
        for split in SPLITS:
            own = keys[split] if plain else np.searchsorted(distinct, keys[split])
            placed, columns = self._items[split].finish(own)
            rows = self._columns(f"{split}-rows")
            rows["item"] = placed[rows["item"]].astype(np.min_scalar_type(-max(placed.size, 1)))
            columns["count"] = np.bincount(rows["item"], minlength=placed.size)
            write_columns(self.folder / f"{split}-items.arrow", columns)
            write_columns(self.folder / f"{split}-rows.arrow", rows)
            requests = self._columns(split)
            order = np.lexsort((requests.pop("row"), requests.pop("order")))
            if self._names[split]:
                write_ids(self.folder / f"{split}-request-ids.arrow", [self._names[split][at] for at in order])
            if self._users[split]:
                write_ids(self.folder / f"{split}-user-ids.arrow", [self._users[split][at] for at in order])
            write_columns(self.folder / f"{split}.arrow", {name: column[order] for name, column in requests.items()})
            if encoder.description.history:
                views = self._columns(f"{split}-views")
                at = np.minimum(np.searchsorted(distinct, views["item"]), distinct.size - 1)
                views["item"] = np.where(distinct[at] == views["item"], distinct[at] if plain else at, -1)
                write_columns(self.folder / f"{split}-views.arrow", views)

    def _columns(self, table: str) -> dict[str, Array]:
        names = [name for name in self._grown.names if name.startswith(f"{table}.")]
        return {name.removeprefix(f"{table}."): self._grown.column(name) for name in names}


def _encoded(encoder: FeatureEncoder, part: DataPart, table: Any, rows: Array) -> Encoded:
    columns = encoder.description.columns(part)
    if not columns:  # a table without columns has no rows
        return Encoded(np.empty((rows.size, 0), dtype=np.int64), np.empty((rows.size, 0), dtype=np.float32))
    return encoder.encode(part, table.select(columns).take(rows))
