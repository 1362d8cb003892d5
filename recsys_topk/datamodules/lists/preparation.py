"""Prepare logged lists as memory-mapped Arrow files: read once, group by request part by part, in bounded memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.catalogue import DistinctItems
from recsys_topk.datamodules.lists.grouping import Grouped, group_rows
from recsys_topk.datamodules.lists.plan import SPLITS, ListsPlan
from recsys_topk.datamodules.lists.rows import RowReader
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.datamodules.prepare.spill import MOST_PARTS
from recsys_topk.datamodules.prepare.work_folder import WorkFolder
from recsys_topk.tabular.arrow import read_streams, write_columns, write_ids, write_stream
from recsys_topk.tabular.features.description import DataPart
from recsys_topk.tabular.features.encoder import Encoded, FeatureEncoder
from recsys_topk.tabular.features.fitter import FeatureFitter
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.columns import keys_of, lists_of, one_chunk
from recsys_topk.types import Array

FORMAT: Final = 3
"""See `PreparedDataModule.format`."""

PART_BYTES: Final = 64 << 20
"""Approximate size of a part in memory."""

_ROWS: Final = 1 << 15
_BYTES_PER_ROW: Final = 64
"""Size of the computed columns of a row."""

_EXPANSION: Final = 4
"""Estimated size of the columns of a file in memory, relative to the file. A larger value makes more parts."""


class ListsPreparation:
    """Makes the prepared files of a plan in a folder.

    The steps are: read the sources, fit the features, encode part by part, write. A later process resumes after the
    last piece that was read, after the fit, or after the last part that was encoded.

    Memory: the rows of one part, the requests, and 16 bytes per distinct item.

    Args:
        plan: What to prepare.
        folder: An empty folder, or the folder of an interrupted preparation of the same plan.
        progress: Receives the progress.
    """

    def __init__(self, plan: ListsPlan, folder: Path, progress: Progress) -> None:
        self.plan, self.folder, self.progress = plan, folder, progress
        self.work = WorkFolder(folder)
        self._grown = self.work.columns
        readers = [reader for reader, _ in plan.sources]
        size = sum(_EXPANSION * (reader.nbytes or 0) + _BYTES_PER_ROW * (reader.rows or 0) for reader in readers)
        self.parts = min(size // PART_BYTES + 1, MOST_PARTS)
        self._reader = RowReader(plan, self.work.path, self.parts)
        self._items = {split: DistinctItems(self._grown, f"{split}-items") for split in SPLITS}

    def run(self) -> None:
        """Run all steps of the preparation."""
        self._reader.read(self.progress)
        if not self._reader.kept:
            reason = "labels maps the stages of all rows to null" if self._reader.seen else "all lists are empty"
            raise ValueError(f"{self.plan.name} has no rows that can be used: {reason}")
        fitted = self.work.path / "features"
        if not self.work.saved:
            self._cuts = self._find_cuts()
            encoder, counts = self._fit()
            shutil.rmtree(fitted, ignore_errors=True)
            encoder.save(fitted)
            self.work.save({"encoded": 0, "rows": 0, "cuts": self._cuts, "counts": counts})
        self._cuts = self.work.saved["cuts"]
        encoder = FeatureEncoder.load(fitted)
        self.progress("encode", self.work.saved["rows"], self._reader.kept)
        for part in range(self.work.saved["encoded"], self.parts):
            table, grouped = self._grouped(part)
            for number, split in enumerate(SPLITS):
                for requests in grouped.chunks(number, _ROWS):
                    self._encode(encoder, split, table, grouped, requests)
                self._save_ids(split, part, table, grouped.first[grouped.split == number])
            self.work.save({**self.work.saved, "encoded": part + 1, "rows": self.work.saved["rows"] + table.num_rows})
            self._reader.pieces.drop(part)
            self.progress("encode", table.num_rows, self._reader.kept)
        shutil.copytree(fitted, self.folder / "features")
        self._write(encoder)
        facts = {
            "format": FORMAT,
            "rows": self._reader.kept,
            "requests": {split: self._grown.length(f"{split}.request_id") for split in SPLITS},
            "items": {split: len(self._items[split]) for split in SPLITS},
            "counts": self.work.saved["counts"],
        }
        self.work.finish(facts)

    def _find_cuts(self) -> tuple[int, int] | None:
        """Return the times at which validation and testing begin; None = requests are not split by time."""
        if self.plan.split != "time":
            return None
        if self.plan.dates is not None:
            return self.plan.dates
        times = []
        for part in range(self.parts):
            table = self._reader.pieces.part(part, ("__request", "__split", "__time"))
            request, split, time = (np.asarray(one_chunk(table.column(name))) for name in table.column_names)
            order = np.lexsort((time, request))
            first = np.r_[True, request[order][1:] != request[order][:-1]][: order.size] & (split[order] < 0)
            times.append(time[order][first])
        ordered = np.sort(np.concatenate(times))
        val, test = self.plan.fractions

        def newest(share: float) -> int:  # share 0: the split has a separate table
            at = min(int((1 - share) * ordered.size), ordered.size - 1)
            return int(ordered[at]) if share else np.iinfo(np.int64).max

        return newest(val + test), newest(test)

    def _grouped(self, part: int) -> tuple[Any, Grouped]:
        table = self._reader.pieces.part(part)
        return table, group_rows(table, self.plan, self._cuts, self._reader.items.id)

    def _fit(self) -> tuple[FeatureEncoder, dict[str, int]]:
        """Return the encoder, and the counts to report."""
        found = np.zeros(len(SPLITS), dtype=np.int64)
        counts: dict[str, int] = {}
        fitter = FeatureFitter(self.plan.description)
        for part in range(self.parts):
            table, grouped = self._grouped(part)
            found += np.bincount(grouped.split, minlength=len(SPLITS))
            for reason, number in grouped.counts.items():
                counts[reason] = counts.get(reason, 0) + number
            for requests in grouped.chunks(0, _ROWS):
                first, rows = grouped.first[requests], grouped.rows_of(requests)
                self._update(fitter, "user", table, first)
                self._update(fitter, "context", table, first)
                self._update(fitter, "items", table, rows)
                if self.plan.description.history:
                    views = self._views(table, first)
                    fitter.update("history", self._view_table(views))
            self.progress("fit", table.num_rows, self._reader.kept)
        for number, split in enumerate(SPLITS):
            if not found[number]:
                raise ValueError(f"the {split} split has no lists ({found.sum()} in all); {self.plan.advice}")
        given = self.plan.features
        return given if isinstance(given, FeatureEncoder) else fitter.finish(), counts

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

    @property
    def _id_columns(self) -> dict[str, str]:
        """The columns of ids that are written as in the source: strings of requests, and users."""
        columns = {"request": "__name"} if "__name" in self._reader.pieces.schema.names else {}
        return {**columns, **({"user": self.plan.roles["user"]} if "user" in self.plan.roles else {})}

    def _save_ids(self, split: str, part: int, table: Any, rows: Array) -> None:
        columns = self._id_columns
        own = table.select(list(columns.values())).rename_columns(list(columns))
        write_stream(self._ids_file(split, part), own.take(rows))

    def _ids_file(self, split: str, part: int) -> Path:
        return self.work.path / f"{split}.{part}.ids"

    def _views(self, table: Any, first: Array) -> Any:
        column = self.plan.roles["history"]
        return lists_of(one_chunk(table.column(column)).take(first), " ", column)

    def _view_table(self, views: Any) -> dict[str, Any]:
        return {self.plan.roles["item"]: views.values}

    def _write(self, encoder: FeatureEncoder) -> None:
        parts = range(self.parts)
        keys = {split: self._items[split].keys() for split in SPLITS}
        distinct = np.unique(np.concatenate([np.unique(own) for own in keys.values()]))
        plain = not self._reader.items.text and distinct[0] >= 0 and distinct[-1] < VARIANT
        if not plain:
            write_ids(self.folder / "item-ids.arrow", self._reader.items.ids(distinct).tolist())
        for split in SPLITS:
            own = keys[split] if plain else np.searchsorted(distinct, keys[split])
            placed, columns = self._items[split].finish(own)
            rows = self.work.table(f"{split}-rows")
            rows["item"] = placed[rows["item"]].astype(np.min_scalar_type(-max(placed.size, 1)))
            columns["count"] = np.bincount(rows["item"], minlength=placed.size)
            write_columns(self.folder / f"{split}-items.arrow", columns)
            write_columns(self.folder / f"{split}-rows.arrow", rows)
            requests = self.work.table(split)
            order = np.lexsort((requests.pop("row"), requests.pop("order")))
            for name in self._id_columns:
                ids = [batch.column(name) for batch in read_streams(self._ids_file(split, part) for part in parts)]
                write_ids(self.folder / f"{split}-{name}-ids.arrow", pa.concat_arrays(ids).take(order).to_pylist())
            write_columns(self.folder / f"{split}.arrow", {name: column[order] for name, column in requests.items()})
            if encoder.description.history:
                views = self.work.table(f"{split}-views")
                at = np.minimum(np.searchsorted(distinct, views["item"]), distinct.size - 1)
                views["item"] = np.where(distinct[at] == views["item"], distinct[at] if plain else at, -1)
                write_columns(self.folder / f"{split}-views.arrow", views)


def _encoded(encoder: FeatureEncoder, part: DataPart, table: Any, rows: Array) -> Encoded:
    columns = encoder.description.columns(part)
    if not columns:  # a table without columns has no rows
        return Encoded(np.empty((rows.size, 0), dtype=np.int64), np.empty((rows.size, 0), dtype=np.float32))
    return encoder.encode(part, table.select(columns).take(rows))
