"""Read interactions once and distribute them to files by user, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.interactions.sequences import ROW
from recsys_topk.datamodules.prepare.raw_ids import RawIds
from recsys_topk.datamodules.prepare.spill import Piece, Pieces
from recsys_topk.tabular.tables.columns import Keys, keys_of, numbers_of, one_chunk, split_numbers
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.tabular.tables.times import check_one_unit, guess_unit, microseconds
from recsys_topk.types import Array

_SAMPLE: Final = 1 << 20
_SEED: Final = 7


class Spill:
    """Interactions in parts by user, read one piece of the sources at a time (`Pieces`).

    Args:
        folder: The folder of the pieces, which may hold pieces of an earlier process.
        roles: The column of each role.
        context: Columns of the interactions that are context features.
        min_rating: Interactions with a lower rating, or without a rating, are left out.
        parts: Number of parts.
        rows: Approximate number of rows.

    Attributes:
        items: The items that occur.
        users: The users that occur.
        unit: The unit of time, once it is known.
        kept: Number of interactions written.
        left_out: Number of interactions left out, by reason.
    """

    def __init__(
        self,
        folder: Path,
        roles: Mapping[str, str],
        context: Sequence[str],
        min_rating: float | None,
        parts: int,
        rows: int,
    ) -> None:
        self.roles, self.context, self.min_rating = roles, list(context), min_rating
        self.parts, self._step = parts, max(rows // _SAMPLE, 1)
        self.items, self.users = RawIds(), RawIds()
        self.unit: str | None = None
        self.kept = 0
        self.left_out: dict[str, int] = {}
        self.span: tuple[int, int] | None = None
        self._times: list[Array] = []
        self._seen = 0
        self._pieces = Pieces(folder, parts, _SEED)

    def read(self, reader: TableReader, split: int | None, done: Callable[[int], None]) -> None:
        """Read a table, except for the pieces that were read before.

        Args:
            reader: The table.
            split: The split number of all its interactions; None = from the split column, or not given.
            done: Called with the number of rows of each batch that was read.
        """
        columns = [column for role, column in self.roles.items() if role != "split" or split is None]
        columns += self.context
        reader.require(columns)
        for folder, facts in self._pieces.read(
            reader, columns, lambda new: _Piece(new, self, reader.name, split), done
        ):
            self._take(folder, facts)

    def part(self, number: int) -> tuple[Array, Any]:
        """Return the interactions of a part (dtype `ROW`) and their context columns as a pyarrow table."""
        table = self._pieces.part(number)
        rows = np.empty(table.num_rows, dtype=ROW)
        for name in ROW.names or ():
            rows[name] = table.column(f"__{name}")
        return rows, table.select(self.context) if self.context else None

    def drop(self, number: int) -> None:
        """Remove the files of a part."""
        self._pieces.drop(number)

    def quantile(self, share: float) -> int:
        """Return the time before which a share of the interactions lies (estimated by a sample for large data)."""
        times = np.sort(np.concatenate(self._times))
        return int(times[min(int(share * times.size), times.size - 1)])

    def _take(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Add the statistics of a piece."""
        self.items.add_keys(np.load(folder / "items.npy"))
        self.items.merge_plain(facts["items"])
        self.users.merge_plain(facts["users"])
        self._times.append(np.load(folder / "times.npy"))
        self.unit = self.unit or facts["unit"]
        self.kept += facts["kept"]
        self._seen += facts["seen"]
        for reason, number in facts["left_out"].items():
            self.left_out[reason] = self.left_out.get(reason, 0) + number
        if facts["span"] is not None:
            low, high = facts["span"]
            self.span = (low, high) if self.span is None else (min(low, self.span[0]), max(high, self.span[1]))


class _Piece(Piece):
    """A piece of the interactions. `split` is the split number of all of them; None = from the split column."""

    def __init__(self, folder: Path, spill: Spill, source: str, split: int | None) -> None:
        super().__init__(folder, spill._pieces, source)
        self.roles, self.context, self.min_rating, self._split = spill.roles, spill.context, spill.min_rating, split
        self._step, self.unit, self._before = spill._step, spill.unit, spill._seen
        self.items, self.users = RawIds(), RawIds()
        self.kept, self._seen = 0, 0
        self.left_out: dict[str, int] = {}
        self.span: tuple[int, int] | None = None
        self._times: list[Array] = [np.empty(0, dtype=np.int64)]

    def statistics(self) -> dict[str, Any]:
        """Save the items and a sample of the times, and return the other statistics."""
        np.save(self.folder / "items.npy", self.items.keys())
        np.save(self.folder / "times.npy", np.concatenate(self._times))
        ids = {"items": self.items.to_plain(), "users": self.users.to_plain()}
        return {"unit": self.unit, "kept": self.kept, "left_out": self.left_out, "span": self.span, **ids}

    def add(self, batch: Any) -> None:
        """Add a record batch."""
        split = self._split
        column = {
            role: one_chunk(batch.column(name)) for role, name in self.roles.items() if name in batch.schema.names
        }
        users, items = keys_of(column["user"]), keys_of(column["item"])
        rows = np.zeros(batch.num_rows, dtype=ROW)
        rows["user"], rows["item"], rows["weight"] = users.keys, items.keys, 1.0
        kept = self._drop(~users.missing, f"no {self.roles['user']}") & self._drop(
            ~items.missing, f"no {self.roles['item']}"
        )
        rows["split"] = (
            split_numbers(column["split"], self.roles["split"]) if split is None and "split" in column else split or 0
        )
        if "time" in column:
            if self.unit is None and column["time"].null_count < batch.num_rows:
                self.unit = guess_unit(column["time"])
            rows["time"], missing = microseconds(column["time"], self.unit or "s", self.roles["time"])
            check_one_unit(rows["time"], self.unit or "s", self.roles["time"])
            kept &= self._drop(~missing, f"no {self.roles['time']}")
        else:  # the order of the rows, with the given splits one after the other
            rows["time"] = (
                self._before + self._seen + np.arange(batch.num_rows) + (rows["split"].astype(np.int64) << 42)
            )
        if self.min_rating is not None:
            rating = numbers_of(column["rating"], self.roles["rating"])
            kept &= self._drop(
                rating >= self.min_rating, f"{self.roles['rating']} below {self.min_rating:g} or missing"
            )
        if "weight" in column:
            weight = numbers_of(column["weight"], self.roles["weight"])
            if (weight < 0).any():
                raise ValueError(
                    f"column {self.roles['weight']!r} has the weight {weight.min():g}; weights must be >= 0"
                )
            rows["weight"] = np.nan_to_num(weight)
            kept &= self._drop(weight > 0, f"{self.roles['weight']} 0 or missing")
        self._seen += batch.num_rows
        if not kept.all():
            where = np.flatnonzero(kept)
            rows, batch = rows[where], batch.take(where)
            column |= {role: column[role].take(where) for role in ("user", "item")}
            users, items = (Keys(keys.keys[where], keys.missing[where], keys.text) for keys in (users, items))
        if rows.size:
            self.items.add(column["item"], items)
            self.users.add(column["user"], users, texts_only=True)
            self._sample(rows["time"])
            self.kept += rows.size
            columns = {f"__{name}": pa.array(rows[name]) for name in ROW.names or ()}
            columns |= {name: batch.column(name) for name in self.context}
            self.write(pa.record_batch(list(columns.values()), names=list(columns)), rows["user"])

    def _drop(self, kept: Array, reason: str) -> Array:
        number = int(kept.size - np.count_nonzero(kept))
        if number:
            self.left_out[reason] = self.left_out.get(reason, 0) + number
        return kept

    def _sample(self, times: Array) -> None:
        low, high = int(times.min()), int(times.max())
        self.span = (low, high) if self.span is None else (min(low, self.span[0]), max(high, self.span[1]))
        self._times.append(times[-self.kept % self._step :: self._step].copy())
