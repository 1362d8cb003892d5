"""Prepare interactions as memory-mapped Arrow files: read once, sort by user part by part, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.interactions.lookup import Lookup
from recsys_topk.datamodules.interactions.sequences import (
    SPLITS,
    SequenceOptions,
    Sequences,
    SplitRequests,
    make_sequences,
    sort_interactions,
)
from recsys_topk.datamodules.interactions.spill import Spill
from recsys_topk.datamodules.interactions.tables import Tables
from recsys_topk.datamodules.prepare.plan import PreparationPlan
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.datamodules.prepare.spill import MOST_PARTS, total_rows
from recsys_topk.datamodules.prepare.work_folder import WorkFolder
from recsys_topk.tabular.arrow import read_streams, write_columns, write_ids, write_stream
from recsys_topk.tabular.features.description import DataPart
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.features.fitter import FeatureFitter
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.tabular.tables.times import describe_times
from recsys_topk.types import Array

FORMAT: Final = 5
"""See `PreparedDataModule.format`."""

ROWS_PER_PART: Final = 1 << 20
_CHUNK: Final = 1 << 18
_BYTES_PER_ROW: Final = 12
"""Estimated bytes per row of a text file. A smaller value makes more parts, which costs little."""


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
            **({"ages": True} if self.ages else {}),
        }


class InteractionsPreparation:
    """Makes the prepared files of a plan in a folder.

    Memory: the interactions of one part (about a million), the distinct users and items, and both tables.

    Args:
        plan: What to prepare.
        folder: An empty folder, or the folder of an interrupted preparation of the same plan.
        progress: Receives the progress.
    """

    def __init__(self, plan: InteractionsPlan, folder: Path, progress: Progress) -> None:
        self.plan, self.folder, self.progress = plan, folder, progress
        described, roles = plan.description, plan.roles
        for feature in described.history:
            if feature not in described.items:
                raise ValueError(
                    f"the history has the feature {feature.name!r}, which is not a feature of items; describe it under "
                    f"items, and name it in the history: [{feature.name}]"
                )
        self._users = Lookup(plan.tables.users, roles["user"], described.columns("user"), "users")
        self._items = Lookup(plan.tables.items, roles["item"], described.columns("items"), "items")
        self._fitter = FeatureFitter(described)
        self.work = WorkFolder(folder)
        self._sorted: int = self.work.saved.get("sorted", 0)
        self._requests_made: int = self.work.saved.get("requests", 0)
        self._duplicates: int = self.work.saved.get("duplicates", 0)
        self._grown = self.work.columns

    def run(self) -> None:
        """Run all steps of the preparation."""
        spill = self._read()
        options = replace(self.plan.sequences, cuts=self._cuts(spill))
        self._items.check_known(spill.items.keys())
        keys = np.union1d(spill.items.keys(), self._items.keys)
        count = (
            np.load(self.work.path / f"count-{self._sorted}.npy")
            if self._sorted
            else np.zeros(keys.size, dtype=np.int64)
        )
        self.progress("sort", self._grown.length("events.item"), spill.kept)
        for number in range(self._sorted, spill.parts):
            self._part(spill, number, keys, count, options)
            self._save_state(number + 1, count)
            spill.drop(number)
        self._check_splits(options, spill.span)
        self._users.check_known(self._grown.column("seen.key"))
        encoder = self._fit(keys, count, spill.parts)
        encoder.save(self.folder / "features")
        self._write(spill, encoder, keys, count)
        facts = {
            "format": FORMAT,
            "interactions": spill.kept - self._duplicates,
            "users": self._grown.length("seen.key"),
            "items": int(keys.size),
            "requests": {split: self._grown.length(f"{split}.user") for split in SPLITS},
            "times": describe_times(spill.unit, *spill.span) if spill.unit and spill.span else "the order of the rows",
            "left_out": {**spill.left_out, **({"repeated rows": self._duplicates} if self._duplicates else {})},
        }
        self.work.finish(facts)

    def _save_state(self, number: int, count: Array) -> None:
        """Save that `number` parts are sorted, so that a later process can resume here."""
        np.save(self.work.path / f"count-{number}.npy", count)
        self.work.save({"sorted": number, "requests": self._requests_made, "duplicates": self._duplicates})
        (self.work.path / f"count-{number - 1}.npy").unlink(missing_ok=True)

    def _read(self) -> Spill:
        plan = self.plan
        readers = [(plan.tables.interactions, 0 if plan.held_out else None)]
        readers += [(plan.held_out[name], SPLITS.index(name)) for name in SPLITS if name in plan.held_out]
        total = total_rows(reader for reader, _ in readers)
        guess = total if total is not None else sum(reader.nbytes or 0 for reader, _ in readers) // _BYTES_PER_ROW
        parts = min(-(-guess // ROWS_PER_PART) + 1, MOST_PARTS)
        spill = Spill(self.work.path, plan.roles, plan.description.columns("context"), plan.min_rating, parts, guess)
        for reader, split in readers:
            spill.read(reader, split, lambda number: self.progress("read", number, total))
        if not spill.kept:
            reasons = ", ".join(f"{number} with {reason}" for reason, number in spill.left_out.items())
            raise ValueError(f"{plan.tables.interactions.name} has no interactions that can be used: {reasons}")
        return spill

    def _cuts(self, spill: Spill) -> tuple[int, int]:
        if self.plan.dates is not None:
            return self.plan.dates
        val, test = self.plan.fractions
        return spill.quantile(1 - val - test), spill.quantile(1 - test)

    def _part(self, spill: Spill, number: int, keys: Array, count: Array, options: SequenceOptions) -> None:
        rows, context = spill.part(number)
        before = rows.size
        rows, where = sort_interactions(rows, self.plan.split_seed)
        self._duplicates += before - rows.size
        rows["item"] = np.searchsorted(keys, rows["item"])
        made = make_sequences(rows, options)
        opens = np.flatnonzero(np.r_[True, rows["user"][1:] != rows["user"][:-1]]) if rows.size else np.empty(0, int)
        user = np.repeat(np.arange(opens.size), np.diff(np.r_[opens, rows.size]))
        trained = rows["split"] == 0 if options.split == "given" else made.split == 0
        items, times = np.unique(rows["item"][trained], return_counts=True)
        count[items] += times
        for split, requests in made.requests.items():
            self._requests(split, requests, rows, made)
            if context is not None:
                write_stream(self._context(split, number), context.take(where[made.row[requests.first]]))
        # The last segment of a user holds all events. If splits are not in time order, it is the test segment.
        done, newest = np.bincount(user, minlength=opens.size), np.zeros(opens.size, dtype=np.int64)
        np.maximum.at(newest, user[made.row], np.arange(made.row.size))
        stop = self._grown.length("events.item") + newest + 1
        self._grown.append("users.start", stop - done)
        self._grown.append("users.stop", stop)
        self._grown.append("seen.key", rows["user"][opens])
        self._grown.append("seen.count", np.bincount(user[trained], minlength=opens.size))
        self._grown.append("events.item", rows["item"][made.row].astype(np.int32))
        if self.plan.ages:
            self._grown.append("events.time", rows["time"][made.row])
        self.progress("sort", before, spill.kept)

    def _requests(self, split: str, requests: SplitRequests, rows: Array, made: Sequences) -> None:
        positive = made.row[requests.positive]
        grown, number = self._grown, requests.user.size
        grown.append(f"{split}.request_id", self._requests_made + np.arange(number))
        grown.append(f"{split}.user", (grown.length("seen.key") + requests.user).astype(np.int32))
        for name in ("start", "stop", "seen", "tied"):
            grown.append(f"{split}.{name}", grown.length("events.item") + getattr(requests, name))
        grown.append(f"{split}.ends", grown.length(f"{split}-positives.item") + requests.ends)
        grown.append(f"{split}-positives.item", rows["item"][positive].astype(np.int32))
        grown.append(f"{split}-positives.weight", rows["weight"][positive])
        self._requests_made += number

    def _context(self, split: str, part: int) -> Path:
        """Return the file with the context columns of a part's requests."""
        return self.work.path / f"{split}.{part}.requests"

    def _contexts(self, split: str, parts: int) -> Iterator[Any]:
        for batch in read_streams(self._context(split, number) for number in range(parts)):
            yield pa.Table.from_batches([batch])

    def _check_splits(self, options: SequenceOptions, span: tuple[int, int] | None) -> None:
        advice = {
            "time": "change val_fraction and test_fraction, or val_from and test_from",
            "leave_last": f"users need more than {2 * options.leave} interactions to be held out",
            "given": "give interactions for it",
        }
        if span is not None and span[0] == span[1]:
            advice["time"] = (
                "all interactions have the same time: check the time column, or use --data.split leave_last"
            )
        for split in SPLITS:
            if not self._grown.length(f"{split}.user"):
                new = (
                    ""
                    if options.repeats
                    else " (an item that the user had before is not a positive, unless --data.repeats is true)"
                )
                raise ValueError(f"the {split} split has no positives{new}; {advice[options.split]}")

    def _fit(self, keys: Array, count: Array, parts: int) -> FeatureEncoder:
        if isinstance(self.plan.features, FeatureEncoder):
            return self.plan.features
        for table in self._contexts("train", parts):
            self._fitter.update("context", table)
        seen = np.flatnonzero(count)
        for here in _chunks(seen.size):
            at = seen[here]
            self._fitter.update("items", self._items.rows(keys[at]), count[at])
        users, times = self._grown.column("seen.key"), self._grown.column("seen.count")
        for here in _chunks(users.size):
            trained = np.flatnonzero(times[here]) + here.start
            self._fitter.update("user", self._users.rows(users[trained]), times[trained])
        return self._fitter.finish()

    def _write(self, spill: Spill, encoder: FeatureEncoder, keys: Array, count: Array) -> None:
        users = self._grown.column("seen.key")
        self._encode(encoder, "user", "users", (self._users.rows(users[here]) for here in _chunks(users.size)))
        self._encode(encoder, "items", "items", (self._items.rows(keys[here]) for here in _chunks(keys.size)))
        spill.items.merge_plain(self._items.ids.to_plain())
        plain = not spill.items.text and (not keys.size or (keys[0] >= 0 and keys[-1] < VARIANT))
        self._save("users", {"key": users})
        self._save("items", {"item_id": keys if plain else np.arange(keys.size), "count": count})
        if not plain:
            write_ids(self.folder / "item-ids.arrow", spill.items.ids(keys).tolist())
        if spill.users.text:
            write_ids(self.folder / "user-ids.arrow", spill.users.ids(users).tolist())
        for split in SPLITS:
            if self.plan.description.columns("context"):
                self._encode(encoder, "context", split, self._contexts(split, spill.parts))
            self._save(split, {})
            self._save(f"{split}-positives", {})
        self._save("events", {})

    def _encode(self, encoder: FeatureEncoder, part: DataPart, table: str, frames: Iterator[Any]) -> None:
        for frame in frames:
            encoded = encoder.encode(part, frame)
            self._grown.append(f"{table}.ids", encoded.ids.astype(np.int32))
            self._grown.append(f"{table}.values", encoded.values)
            self.progress("encode", frame.num_rows, None)

    def _save(self, table: str, columns: Mapping[str, Array]) -> None:
        """Write a table: the given columns, and those collected under its name."""
        write_columns(self.folder / f"{table}.arrow", {**columns, **self.work.table(table)})


def _chunks(number: int) -> Iterator[slice]:
    for start in range(0, number, _CHUNK):
        yield slice(start, min(start + _CHUNK, number))
