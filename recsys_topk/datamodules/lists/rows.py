"""Read the rows of all sources as uniform columns: request and item keys, label, group, time, split, features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.labels import graded
from recsys_topk.datamodules.lists.plan import ListsPlan
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.datamodules.prepare.raw_ids import RawIds
from recsys_topk.datamodules.prepare.spill import Piece, Pieces, total_rows
from recsys_topk.tabular.features.description import DATA_PARTS
from recsys_topk.tabular.tables.columns import Keys, keys_of, numbers_of, one_chunk, split_numbers
from recsys_topk.tabular.tables.times import check_one_unit, guess_unit, microseconds
from recsys_topk.types import Array

_SEED: Final = 11


class RowReader:
    """Reads the sources of a plan once and distributes their rows to parts by request (`Pieces`).

    The rows have the columns ``__request`` and ``__item`` (keys), ``__label``, ``__group``, ``__time`` (microseconds, 0
    if there is none), ``__split`` (-1 = not known), ``__row`` (counted over all sources), ``__name`` (requests with
    string ids), and the columns used by features.

    Args:
        plan: What to read.
        folder: The folder of the pieces, which may hold pieces of an earlier process.
        parts: Number of parts.

    Attributes:
        items: The item ids that are strings.
        kept: Number of rows written.
        seen: Number of rows read.
        unit: The unit of time, once it is known.
    """

    def __init__(self, plan: ListsPlan, folder: Path, parts: int) -> None:
        self.plan = plan
        self.pieces = Pieces(folder, parts, _SEED)
        self.items = RawIds()
        self.kept, self.seen = 0, 0
        self.unit: str | None = None
        columns = [column for part in DATA_PARTS for column in plan.description.columns(part)]
        history = [plan.roles["history"]] if plan.description.history else []
        user = [plan.roles["user"]] if "user" in plan.roles else []
        self.features = list(dict.fromkeys([*columns, *history, *user]))
        told = ["label"] if plan.stages is None else ["stage", "position"][: 1 + plan.stages.needs_position]
        for role in told:
            if plan.roles.get(role) in columns:
                raise ValueError(
                    f"column {plan.roles[role]!r} is the {role}, from which labels are made, so it cannot be a "
                    f"feature; remove it from the description"
                )

    def read(self, progress: Progress) -> None:
        """Read all sources in order, except for the pieces that were read before."""
        total = total_rows(reader for reader, _ in self.plan.sources)
        for reader, split in self.plan.sources:
            roles = {role: name for role, name in self.plan.roles.items() if role != "split" or split is None}
            columns, start = [*roles.values(), *self.features], self.seen

            def piece(
                folder: Path, name: str = reader.name, split: int | None = split, roles: Any = roles, start: int = start
            ) -> Piece:
                return _RowPiece(folder, self, name, split, roles, start)

            for _, facts in self.pieces.read(reader, columns, piece, lambda rows: progress("read", rows, total)):
                self.items.merge_plain(facts["items"])
                self.unit = self.unit or facts["unit"]
                self.kept += facts["kept"]
                self.seen += facts["seen"]


class _RowPiece(Piece):
    """A piece of a source. `start` is the number of rows of the sources before it."""

    def __init__(
        self, folder: Path, rows: RowReader, source: str, split: int | None, roles: Mapping[str, str], start: int
    ) -> None:
        super().__init__(folder, rows.pieces, source)
        self.plan, self.features, self._split, self._roles = rows.plan, rows.features, split, roles
        self._before, self._done, self._unit = start, rows.seen, rows.unit
        self._items = RawIds()
        self._kept = 0

    def statistics(self) -> dict[str, Any]:
        """Return the number of rows kept, the string ids of items, and the unit of time."""
        return {"kept": self._kept, "items": self._items.to_plain(), "unit": self._unit}

    def add(self, batch: Any) -> None:
        """Add a record batch."""
        columns = {role: one_chunk(batch.column(name)) for role, name in self._roles.items()}
        request = self._present(keys_of(columns["request"]), "request")
        named = not _is_number(columns["request"].type)
        if self._schema is not None and named != ("__name" in self._schema.names):
            raise ValueError(
                f"column {self._roles['request']!r} is text in one table and numbers in another; make it one type"
            )
        made, kept = self._computed(batch.num_rows, columns)
        made |= {"__request": request, "__split": self._splits(columns.get("split"), batch.num_rows)}
        arrays: dict[str, Any] = {name: pa.array(column) for name, column in made.items()}
        if named:
            arrays["__name"] = columns["request"].cast(pa.string())
        arrays |= {name: one_chunk(batch.column(name)) for name in self.features}
        rows = pa.record_batch(list(arrays.values()), names=list(arrays))
        if kept.size < rows.num_rows:
            rows = rows.take(pa.array(kept))
        self._done += batch.num_rows
        self._kept += rows.num_rows
        self.write(rows, request[kept])

    def _computed(self, number: int, columns: dict[str, Any]) -> tuple[dict[str, Array], Array]:
        """Return the computed columns, and the rows to keep."""
        row = self._done + np.arange(number)
        item, roles = row, self._roles
        if "item" in columns:
            keys = keys_of(columns["item"])
            item = self._present(keys, "item")
            self._items.add(columns["item"], keys, texts_only=True)
        stages = self.plan.stages
        if stages is None:
            label = graded(columns["label"], roles["label"], self._done - self._before)
            group = np.zeros(number, dtype=np.int8)
        else:
            position = numbers_of(columns["position"], roles["position"]) if "position" in columns else None
            label, group = stages.apply(columns["stage"], position, roles["stage"], roles.get("position", "position"))
        time = np.zeros(number, dtype=np.int64)
        if "time" in columns:
            self._unit = self._unit or guess_unit(columns["time"])
            time, missing = microseconds(columns["time"], self._unit, roles["time"])
            check_one_unit(time, self._unit, roles["time"])
            if missing.any():
                raise ValueError(
                    f"{self._first(missing)}: column {roles['time']!r} has no time; remove the row or the column"
                )
        made = {"__item": item, "__label": label, "__group": group, "__time": time, "__row": row}
        return made, np.flatnonzero(group >= 0)

    def _present(self, keys: Keys, role: str) -> Array:
        if keys.missing.any():
            raise ValueError(
                f"{self._first(keys.missing)}: column {self._roles[role]!r} has no value; every row needs one"
            )
        return keys.keys

    def _first(self, wrong: Array) -> str:
        """Return the source and the number of the first wrong row of a batch, for error messages."""
        return f"{self.source}, row {self._done - self._before + int(np.flatnonzero(wrong)[0]) + 1}"

    def _splits(self, column: Any, number: int) -> Array:
        if self._split is not None or column is None or self.plan.split != "column":
            return np.full(number, -1 if self._split is None else self._split, dtype=np.int8)
        return split_numbers(column, self.plan.roles["split"])


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
