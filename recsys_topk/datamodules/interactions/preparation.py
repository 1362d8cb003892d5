"""Prepare interactions as memory-mapped Arrow files: read once, sort by user, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.interactions.rows import RowCleaner
from recsys_topk.datamodules.interactions.sequences import (
    ROW,
    SPLITS,
    SequenceOptions,
    make_sequences,
    sort_interactions,
)
from recsys_topk.datamodules.interactions.tables import Tables
from recsys_topk.datamodules.prepare.engine.base import Engine, EngineTable
from recsys_topk.datamodules.prepare.engine.column_files import ColumnFiles
from recsys_topk.datamodules.prepare.ids import SourceIds
from recsys_topk.datamodules.prepare.lookup import Lookup
from recsys_topk.datamodules.prepare.plan import PreparationPlan
from recsys_topk.files import write_whole
from recsys_topk.tabular.arrow import write_columns, write_ids
from recsys_topk.tabular.features.description import DataPart
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.features.fitter import FeatureFitter
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.columns import is_text, is_whole, keys_of, one_chunk
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.tabular.tables.times import describe_times, first_unit
from recsys_topk.types import Array

FORMAT: Final = 6
"""See `PreparedDataModule.format`."""

CHUNK_ROWS: Final = 1 << 18
"""Number of interactions that are made into requests at a time. The prepared files do not depend on it."""

_CHUNK: Final = 1 << 18


@dataclass(frozen=True, kw_only=True)
class InteractionsPlan(PreparationPlan):
    """Describes which interactions to prepare.

    Attributes:
        tables: The tables; validation and test tables are in `held_out`.
        held_out: Separate tables of the validation and test splits.
        sequences: How interactions become requests. The cuts are computed from the data unless `dates` is set.
        min_rating: Interactions with a lower rating are left out.
        ages: Whether to store the time of each interaction, for the ages of views.
    """

    tables: Tables
    held_out: Mapping[str, TableReader]
    sequences: SequenceOptions
    min_rating: float | None = None
    ages: bool = False

    def facts(self) -> dict[str, Any]:
        """See `PreparationPlan.facts`."""
        tables = (self.tables.interactions, self.tables.users, self.tables.items, *self.held_out.values())
        return {
            **super().facts(),
            "tables": [None if table is None else table.fingerprint() for table in tables],
            "sequences": asdict(self.sequences),
            "min_rating": self.min_rating,
            **({"ages": True} if self.times else {}),
        }

    @property
    def times(self) -> bool:
        """Whether to store the time of each interaction."""
        return self.ages or self.sequences.split == "time"


@dataclass(frozen=True)
class ChunkMaker:
    """Makes the requests of some users from their rows. It is the same for every engine.

    Attributes:
        options: Options of the split and the requests.
        seed: Seed of the order of interactions at the same time.
        keys: The keys of all items, ascending.
        times: Whether to store the time of each interaction.
    """

    options: SequenceOptions
    seed: int
    keys: Array
    times: bool

    def __call__(self, table: Any) -> dict[str, Any]:
        """Return the prepared columns of a table that holds all rows of its users, by table and name.

        Offsets count from the start of the chunk. The names of context columns begin with a second dot.
        """
        rows = np.zeros(table.num_rows, dtype=ROW)
        rows["weight"] = 1.0
        for name in ROW.names or ():
            if name in table.column_names:
                rows[name] = np.asarray(one_chunk(table.column(name)))
        rows, where = sort_interactions(rows, self.seed, self.keys)
        made = make_sequences(rows, self.options)
        opens = np.flatnonzero(np.r_[True, rows["user"][1:] != rows["user"][:-1]])
        user = np.repeat(np.arange(opens.size), np.diff(np.r_[opens, rows.size]))
        trained = rows["split"] == 0 if self.options.split == "given" else made.split == 0
        # The last segment of a user holds all events. If splits are not in time order, it is the test segment.
        done, newest = np.bincount(user, minlength=opens.size), np.zeros(opens.size, dtype=np.int64)
        np.maximum.at(newest, user[made.row], np.arange(made.row.size))
        item, number = np.unique(rows["item"][trained], return_counts=True)
        columns = {
            "chunk.rows": np.array([table.num_rows]),
            "chunk.repeated": np.array([table.num_rows - rows.size]),
            "trained.item": item,
            "trained.number": number,
            "users.start": newest + 1 - done,
            "users.stop": newest + 1,
            "users.key": rows["user"][opens],
            "users.count": np.bincount(user[trained], minlength=opens.size),
            "events.item": rows["item"][made.row].astype(np.int32),
        }
        if self.times:
            columns["events.time"] = rows["time"][made.row]
        names = [name for name in table.column_names if name.startswith(".")]
        for split, requests in made.requests.items():
            positive = made.row[requests.positive]
            columns[f"{split}.user"] = requests.user.astype(np.int32)
            columns |= {
                f"{split}.{name}": getattr(requests, name) for name in ("start", "stop", "seen", "tied", "ends")
            }
            columns[f"{split}-positives.item"] = rows["item"][positive].astype(np.int32)
            columns[f"{split}-positives.weight"] = rows["weight"][positive]
            if names:
                context = table.select(names).take(pa.array(where[made.row[requests.first]]))
                columns |= {f"{split}.{name}": context.column(name) for name in names}
        return columns


class InteractionsPreparation:
    """Makes the prepared files of a plan in a folder.

    Memory: that of the engine, a million interactions, the distinct users and items, and both tables.

    Args:
        plan: What to prepare.
        folder: The folder to prepare.
        engine: Holds the rows.
    """

    def __init__(self, plan: InteractionsPlan, folder: Path, engine: Engine) -> None:
        self.plan, self.folder, self.engine = plan, folder, engine
        described, roles = plan.description, plan.roles
        for feature in described.history:
            if feature not in described.items:
                raise ValueError(
                    f"the history has the feature {feature.name!r}, which is not a feature of items; describe it under "
                    f"items, and name it in the history: [{feature.name}]"
                )
        self._users = Lookup(plan.tables.users, roles["user"], described.columns("user"), "users")
        self._items = Lookup(plan.tables.items, roles["item"], described.columns("items"), "items")
        self._columns = ColumnFiles(engine.work)

    def run(self) -> None:
        """Run all steps of the preparation."""
        engine, plan = self.engine, self.plan
        unit, kept = self._read()
        text = is_text(engine.schema.field("user").type)
        found = {role: engine.distinct(role) for role in (["user"] if text else []) + ["item"]}
        items = SourceIds.of(found["item"], self._items.ids)
        keys = {role: keys_of(ids).keys for role, ids in found.items()}
        self._items.check_known(keys["item"])
        options = replace(plan.sequences, cuts=self._cuts())
        make = ChunkMaker(options, plan.split_seed, items.keys, plan.times)
        numbers = {**keys, "item": np.searchsorted(items.keys, keys["item"]).astype(np.int32)}
        ids = {role: pa.table({"id": found[role], "number": number}) for role, number in numbers.items()}
        order = ["user", "time", *(["row"] if plan.description.columns("context") else [])]
        count, duplicates = np.zeros(items.keys.size, dtype=np.int64), 0
        for chunk in engine.chunks(ids, order, CHUNK_ROWS, make):
            self._append(chunk)
            count[np.asarray(chunk["trained.item"])] += np.asarray(chunk["trained.number"])
            duplicates += chunk["chunk.repeated"][0].as_py()
            engine.progress("sort", chunk["chunk.rows"][0].as_py(), kept)
        span = engine.span("time")
        self._check_splits(options, span)
        self._users.check_known(self._columns.column("users.key"))
        encoder = self._fit(items.keys, count)
        encoder.save(self.folder / "features")
        texts = SourceIds.of(found["user"]) if "user" in found else None
        self._write(encoder, texts, items, count)
        facts = {
            "format": FORMAT,
            "interactions": kept - duplicates,
            "users": self._columns.length("users.key"),
            "items": int(items.keys.size),
            "requests": {split: self._columns.length(f"{split}.user") for split in SPLITS},
            "split": plan.sequences.split,
            "times": describe_times(unit, *span) if unit else "the order of the rows",
            "left_out": {**engine.left_out, **({"repeated rows": duplicates} if duplicates else {})},
        }
        self._columns.close()
        write_whole(self.folder / "facts.json", json.dumps(facts, indent=1) + "\n")

    def _read(self) -> tuple[str | None, int]:
        """Read the tables; return the unit of time and the number of interactions kept."""
        plan = self.plan
        readers = [(plan.tables.interactions, 0 if plan.held_out else None)]
        readers += [(plan.held_out[name], SPLITS.index(name)) for name in SPLITS if name in plan.held_out]
        for reader, _ in readers:
            reader.require(plan.roles[role] for role in ("user", "item", "time") if role in plan.roles)
        kinds = {
            role: [reader.schema.field(plan.roles[role]).type for reader, _ in readers] for role in ("user", "item")
        }
        text = [role for role, own in kinds.items() if not all(map(is_whole, own))]
        unit = first_unit((reader for reader, _ in readers), plan.roles["time"]) if "time" in plan.roles else None
        tables = []
        for reader, split in readers:
            clean = RowCleaner(
                plan.roles, text, plan.description.columns("context"), unit, plan.min_rating, split,
                splits=plan.sequences.split == "given",
            )  # fmt: skip
            reader.require(clean.columns)
            tables.append(EngineTable(reader, clean.columns, clean))
        kept = self.engine.read(tables)
        if not kept:
            reasons = ", ".join(f"{number} with {reason}" for reason, number in self.engine.left_out.items())
            raise ValueError(f"{plan.tables.interactions.name} has no interactions that can be used: {reasons}")
        return unit, kept

    def _cuts(self) -> tuple[int, int]:
        if self.plan.dates is not None or self.plan.sequences.split != "time":
            return self.plan.dates or (0, 0)
        val, test = self.plan.fractions
        first, second = self.engine.quantiles("time", [1 - val - test, 1 - test])
        return first, second

    def _append(self, chunk: Mapping[str, Any]) -> None:
        """Append the columns of a chunk, and add to its offsets the rows that came before."""
        files, made = self._columns, sum(self._columns.length(f"{split}.user") for split in SPLITS)
        before = {name: files.length(name) for name in chunk}
        for name, values in chunk.items():
            table, _, kind = name.partition(".")
            if table in ("chunk", "trained") or kind.startswith("."):
                continue
            column = np.asarray(values)
            counted = {"user": "users.key", "ends": f"{table}-positives.item"}
            counted |= dict.fromkeys(("start", "stop", "seen", "tied"), "events.item")
            shift = before.get(counted.get(kind, ""), 0)
            if kind == "user":
                files.append(f"{table}.request_id", made + np.arange(column.size))
                made += column.size
            files.append(name, column + column.dtype.type(shift) if shift else column)

    def _contexts(self, split: str) -> Iterator[Any]:
        """Yield the context columns of the requests of a split."""
        for chunk, _ in self.engine.saved():
            own = {name: column for name, column in chunk.items() if name.startswith(f"{split}..")}
            if own:
                yield pa.table(own).rename_columns([name.removeprefix(f"{split}..") for name in own])

    def _check_splits(self, options: SequenceOptions, span: tuple[int, int]) -> None:
        advice = {
            "time": "change val_fraction and test_fraction, or val_from and test_from",
            "leave_last": f"users need more than {2 * options.leave} interactions to be held out",
            "given": "give interactions for it",
        }
        if span[0] == span[1]:
            advice["time"] = "all interactions have the same time: check the column, or use --data.split leave_last"
        seen = (
            "" if options.repeats else " (an item that the user had before is not one, unless --data.repeats is true)"
        )
        for split in SPLITS:
            if not self._columns.length(f"{split}.user"):
                raise ValueError(f"the {split} split has no positives{seen}; {advice[options.split]}")

    def _fit(self, keys: Array, count: Array) -> FeatureEncoder:
        if isinstance(self.plan.features, FeatureEncoder):
            return self.plan.features
        fitter = FeatureFitter(self.plan.description)
        for table in self._contexts("train"):
            fitter.update("context", table)
        users, times = self._columns.column("users.key"), self._columns.column("users.count")
        parts: dict[DataPart, tuple[Lookup, Array, Array]] = {
            "items": (self._items, keys, count),
            "user": (self._users, users, times),
        }
        for part, (lookup, ids, counts) in parts.items():
            for here in _slices(ids.size):
                seen = np.flatnonzero(counts[here]) + here.start
                fitter.update(part, lookup.rows(ids[seen]), counts[seen])
        return fitter.finish()

    def _write(self, encoder: FeatureEncoder, texts: SourceIds | None, items: SourceIds, count: Array) -> None:
        users, keys = self._columns.column("users.key"), items.keys
        self._encode(encoder, "user", "users", (self._users.rows(users[here]) for here in _slices(users.size)))
        self._encode(encoder, "items", "items", (self._items.rows(keys[here]) for here in _slices(keys.size)))
        plain = items.texts is None and keys[0] >= 0 and keys[-1] < VARIANT
        if not plain:
            write_ids(self.folder / "item-ids.arrow", items.names())
        if texts is not None and texts.texts is not None:
            write_ids(self.folder / "user-ids.arrow", texts.names(users))
        for split in SPLITS:
            if self.plan.description.columns("context"):
                self._encode(encoder, "context", split, self._contexts(split))
        given = {"items": {"item_id": keys if plain else np.arange(keys.size), "count": count}}
        for table in ("users", "items", *SPLITS, *(f"{split}-positives" for split in SPLITS), "events"):
            columns = {**given.get(table, {}), **self._columns.table(table)}
            if table == "users":
                del columns["count"]
            write_columns(self.folder / f"{table}.arrow", columns)

    def _encode(self, encoder: FeatureEncoder, part: DataPart, table: str, frames: Iterator[Any]) -> None:
        for frame in frames:
            encoded = encoder.encode(part, frame)
            self._columns.append(f"{table}.ids", encoded.ids.astype(np.int32))
            self._columns.append(f"{table}.values", encoded.values)
            self.engine.progress("encode", frame.num_rows, None)


def _slices(number: int) -> Iterator[slice]:
    for start in range(0, number, _CHUNK):
        yield slice(start, min(start + _CHUNK, number))
