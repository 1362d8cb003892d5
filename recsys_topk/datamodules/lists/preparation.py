"""Prepare logged lists as memory-mapped Arrow files: read once, sort by request, in bounded memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.catalogue import DistinctItems
from recsys_topk.datamodules.lists.grouping import Grouped, ListMaker
from recsys_topk.datamodules.lists.plan import COUNTS, SPLITS, ListsPlan
from recsys_topk.datamodules.lists.rows import ListCleaner
from recsys_topk.datamodules.prepare.engine.base import Engine, EngineTable
from recsys_topk.datamodules.prepare.engine.column_files import ColumnFiles
from recsys_topk.datamodules.prepare.ids import SourceIds
from recsys_topk.files import write_whole
from recsys_topk.tabular.arrow import write_columns, write_ids
from recsys_topk.tabular.features.description import DATA_PARTS, DataPart
from recsys_topk.tabular.features.encoder import Encoded, FeatureEncoder
from recsys_topk.tabular.features.fitter import FeatureFitter
from recsys_topk.tabular.ids.counter import distinct_keys
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.columns import is_number, is_text, is_whole, keys_of, lists_of
from recsys_topk.tabular.tables.times import first_unit
from recsys_topk.types import Array

FORMAT: Final = 4
"""See `PreparedDataModule.format`."""

CHUNK_ROWS: Final = 1 << 18
"""Number of rows that are grouped at a time. The lists do not depend on it; the order of their rows does."""

_ROWS: Final = 1 << 15


class ListsPreparation:
    """Makes the prepared files of a plan in a folder.

    The steps are: read the sources, sort by request and fit the features, encode, write. Memory: that of the engine,
    some rows, the requests, and 16 bytes per distinct item.

    Args:
        plan: What to prepare.
        folder: The folder to prepare.
        engine: Holds the rows.
    """

    def __init__(self, plan: ListsPlan, folder: Path, engine: Engine) -> None:
        self.plan, self.folder, self.engine = plan, folder, engine
        self._grown = ColumnFiles(engine.work)
        self._items = {split: DistinctItems(self._grown, f"{split}-items") for split in SPLITS}
        self._ids: dict[str, SourceIds] = {}

    def run(self) -> None:
        """Run all steps of the preparation."""
        engine = self.engine
        kept, counts = self._read(), Counter[str]()
        if self.plan.feedback is not None:
            pair = ["__request", "__item"]
            told, there = engine.raise_labels(self.plan.feedback.batches(), pair, "__label", "__group")
            counts.update({"items with an event": there, "items with an event that are in no list": told - there})
        if self.plan.counted_above is not None:
            engine.count_before(COUNTS, self.plan.counted_above)
        ids = {}
        for role in ("request", "item"):
            if is_text(engine.schema.field(f"__{role}").type):
                found = engine.distinct(f"__{role}")
                self._ids[role] = SourceIds.of(found)
                ids[f"__{role}"] = pa.table({"id": found, "number": keys_of(found).keys})
        make = ListMaker(replace(self.plan, sources=()), self._cuts(), self._ids)
        fitter, found = FeatureFitter(self.plan.description), np.zeros(len(SPLITS), np.int64)
        for chunk in engine.chunks(ids, ["__request", "__row"], CHUNK_ROWS, make):
            grouped = Grouped.of(chunk)
            self._fit(fitter, grouped)
            found += np.bincount(grouped.split, minlength=len(SPLITS))
            for name, number in chunk.items():
                if name.startswith("counts."):
                    counts[name.removeprefix("counts.")] += number[0].as_py()
            engine.progress("sort", chunk["chunk.rows"][0].as_py(), kept)
        for split, number in zip(SPLITS, found.tolist(), strict=True):
            if not number:
                raise ValueError(f"the {split} split has no lists ({found.sum()} in all); {self.plan.advice}")
        given = self.plan.features
        encoder = given if isinstance(given, FeatureEncoder) else fitter.finish()
        encoder.save(self.folder / "features")
        for grouped in (Grouped.of(chunk) for chunk, _ in engine.saved()):
            for number, split in enumerate(SPLITS):
                for requests in grouped.chunks(number, _ROWS):
                    self._encode(encoder, split, grouped, requests)
            engine.progress("encode", int(grouped.length.sum()), kept)
        self._write(encoder)
        facts = {
            "format": FORMAT,
            "rows": kept,
            "requests": {split: self._grown.length(f"{split}.request_id") for split in SPLITS},
            "items": {split: len(self._items[split]) for split in SPLITS},
            "counts": counts,
        }
        self._grown.close()
        write_whole(self.folder / "facts.json", json.dumps(facts, indent=1) + "\n")

    def _read(self) -> int:
        """Read the sources and return the number of rows kept."""
        plan = self.plan
        readers = [reader for reader, _ in plan.sources]
        columns = [column for part in DATA_PARTS for column in plan.description.columns(part)]
        history = [plan.roles["history"]] if plan.description.history else []
        user = [plan.roles["user"]] if "user" in plan.roles else []
        counted = () if plan.counted_above is None else COUNTS
        features = [name for name in dict.fromkeys([*columns, *history, *user]) if name not in counted]
        told = ["label"] if plan.stages is None else ["stage", "position"][: 1 + plan.stages.needs_position]
        for role in told:
            if plan.roles.get(role) in columns:
                raise ValueError(
                    f"column {plan.roles[role]!r} is the {role}, from which labels are made, so it cannot be a "
                    f"feature; remove it from the description"
                )
        kinds = {role: [reader.schema.field(plan.roles[role]).type for reader in readers]
                 for role in ("request", "item") if role in plan.roles}  # fmt: skip
        if len({is_number(kind) for kind in kinds["request"]}) > 1:
            raise ValueError(
                f"column {plan.roles['request']!r} is text in one table and numbers in another; make it one type"
            )
        self._named = not is_number(kinds["request"][0])
        text = [role for role, own in kinds.items() if not all(map(is_whole, own))]
        unit = first_unit(readers, plan.roles["time"]) if "time" in plan.roles else None
        tables = []
        for reader, split in plan.sources:
            roles = {role: name for role, name in plan.roles.items() if role != "split" or split is None}
            clean = ListCleaner(roles, text, features, plan.stages, unit, split)
            tables.append(EngineTable(reader, clean.columns, clean))
        kept = self.engine.read(tables)
        if not kept:
            reason = "labels maps the stages of all rows to null" if self.engine.seen else "all lists are empty"
            raise ValueError(f"{plan.name} has no rows that can be used: {reason}")
        return kept

    def _cuts(self) -> tuple[int, int] | None:
        """Return the times at which validation and testing begin; None = requests are not split by time."""
        if self.plan.split != "time" or self.plan.dates is not None:
            return self.plan.dates if self.plan.split == "time" else None
        val, test = self.plan.fractions
        times = self.engine.begins()
        never = np.iinfo(np.int64).max  # share 0: the split has a separate table
        if not times.size:
            return never, never
        first, second = (times[min(int(share * times.size), times.size - 1)] for share in (1 - val - test, 1 - test))
        return int(first) if val + test else never, int(second) if test else never

    def _fit(self, fitter: FeatureFitter, grouped: Grouped) -> None:
        for requests in grouped.chunks(0, _ROWS):
            first, rows = grouped.start[requests], grouped.rows_of(requests)
            parts: dict[DataPart, Array] = {"user": first, "context": first, "items": rows}
            for part, chosen in parts.items():
                columns = self.plan.description.columns(part)
                if columns:
                    fitter.update(part, grouped.columns(columns, chosen))
            if self.plan.description.history:
                fitter.update("history", self._view_table(self._views(grouped, first)))

    def _encode(self, encoder: FeatureEncoder, split: str, grouped: Grouped, requests: Array) -> None:
        grown, first, rows = self._grown, grouped.start[requests], grouped.rows_of(requests)
        described = self.plan.description
        columns = {name: np.asarray(grouped.rows[f"__{name}"]) for name in ("item", "label", "group", "row")}
        encoded = _encoded(encoder, "items", grouped, rows)
        keys, items = columns["item"][rows], self._items[split]
        numbers = items.add(keys, encoded) if "item" in self.plan.roles else items.append(keys, encoded)
        length = grouped.length[requests]
        start = grown.length(f"{split}-rows.label") + np.cumsum(length) - length
        grown.append(f"{split}-rows.item", numbers)
        grown.append(f"{split}-rows.label", columns["label"][rows])
        grown.append(f"{split}-rows.group", columns["group"][rows])
        made = [_encoded(encoder, "user", grouped, first), _encoded(encoder, "context", grouped, first)]
        request = {
            "request_id": grouped.request[requests],
            "start": start,
            "length": length,
            "order": grouped.time[requests],
            "row": columns["row"][first],
            "time": np.asarray(grouped.rows["__time"])[first],
            "ids": np.concatenate([part.ids for part in made], axis=1).astype(np.int32),
            "values": np.concatenate([part.values for part in made], axis=1),
        }
        if described.history:
            views = self._views(grouped, first)
            before = grown.length(f"{split}-views.ids")
            request["view_start"] = before + np.cumsum(views.length) - views.length
            request["view_length"] = views.length
            history = encoder.encode("history", self._view_table(views))
            grown.append(f"{split}-views.ids", history.ids.astype(np.int32))
            viewed = keys_of(views.values)
            grown.append(f"{split}-views.item", np.where(viewed.missing, -1, viewed.keys))
        for name, column in request.items():
            grown.append(f"{split}.{name}", column)

    def _views(self, grouped: Grouped, first: Array) -> Any:
        column = self.plan.roles["history"]
        return lists_of(grouped.rows[column].take(pa.array(first)), " ", column)

    def _view_table(self, views: Any) -> dict[str, Any]:
        return {self.plan.roles["item"]: views.values}

    def _write(self, encoder: FeatureEncoder) -> None:
        keys = {split: self._items[split].keys() for split in SPLITS}
        distinct = distinct_keys(np.concatenate([distinct_keys(own)[0] for own in keys.values()]))[0]
        names = self._ids.get("item")
        plain = (names is None or names.texts is None) and distinct[0] >= 0 and distinct[-1] < VARIANT
        if not plain:
            write_ids(self.folder / "item-ids.arrow", distinct.tolist() if names is None else names.names(distinct))
        for number, split in enumerate(SPLITS):
            own = keys[split] if plain else np.searchsorted(distinct, keys[split])
            placed, columns = self._items[split].finish(own)
            rows = self._grown.table(f"{split}-rows")
            rows["item"] = placed[rows["item"]].astype(np.min_scalar_type(-max(placed.size, 1)))
            columns["count"] = np.bincount(rows["item"], minlength=placed.size)
            write_columns(self.folder / f"{split}-items.arrow", columns)
            write_columns(self.folder / f"{split}-rows.arrow", rows)
            requests = self._grown.table(split)
            order = np.lexsort((requests.pop("row"), requests.pop("order")))
            if self._named or ("request" in self._ids and self._ids["request"].texts is not None):
                ids = self._ids["request"].names(requests["request_id"][order])
                write_ids(self.folder / f"{split}-request-ids.arrow", [str(one) for one in ids])
            if "user" in self.plan.roles:
                column = self.plan.roles["user"]
                made = (Grouped.of(chunk) for chunk, _ in self.engine.saved())
                users = pa.chunked_array([
                    grouped.rows[column].take(pa.array(grouped.start[grouped.split == number])) for grouped in made
                ])  # fmt: skip
                write_ids(self.folder / f"{split}-user-ids.arrow", users.take(pa.array(order)).to_pylist())
            write_columns(self.folder / f"{split}.arrow", {name: column[order] for name, column in requests.items()})
            if encoder.description.history:
                views = self._grown.table(f"{split}-views")
                at = np.minimum(np.searchsorted(distinct, views["item"]), distinct.size - 1)
                views["item"] = np.where(distinct[at] == views["item"], distinct[at] if plain else at, -1)
                write_columns(self.folder / f"{split}-views.arrow", views)


def _encoded(encoder: FeatureEncoder, part: DataPart, grouped: Grouped, rows: Array) -> Encoded:
    columns = encoder.description.columns(part)
    if not columns:  # a table without columns has no rows
        return Encoded(np.empty((rows.size, 0), dtype=np.int64), np.empty((rows.size, 0), dtype=np.float32))
    return encoder.encode(part, grouped.columns(columns, rows))
