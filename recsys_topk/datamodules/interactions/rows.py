"""Clean rows of interactions: times, weights and splits as numbers, and without the rows that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.tabular.tables.columns import id_column, numbers_of, one_chunk, split_numbers
from recsys_topk.tabular.tables.times import check_one_unit, microseconds
from recsys_topk.types import Array


@dataclass(frozen=True)
class RowCleaner:
    """Cleans record batches of interactions; see `Clean`.

    The rows have the columns ``user`` and ``item`` (ids), ``time`` (microseconds), ``weight``, ``split`` and ``row``
    where they are needed, and the context columns under their names with ``.`` before them.

    Attributes:
        roles: The column of each role.
        text: The roles, of user and item, whose ids are stored as text.
        context: Columns of the interactions that are context features.
        unit: The unit of time; None = all times are missing.
        min_rating: Interactions with a lower rating, or without a rating, are left out.
        split: The split number of all interactions; None = from the split column, or not given.
        splits: Whether the rows have a split.
    """

    roles: Mapping[str, str]
    text: Sequence[str]
    context: Sequence[str]
    unit: str | None
    min_rating: float | None
    split: int | None
    splits: bool

    @property
    def columns(self) -> list[str]:
        """The columns to read."""
        return [*(name for role, name in self.roles.items() if role != "split" or self.split is None), *self.context]

    def __call__(self, batch: Any, start: int, before: int) -> tuple[Any, dict[str, int]]:
        """Return the rows to keep, and the number of rows left out by reason."""
        column = {
            role: one_chunk(batch.column(name)) for role, name in self.roles.items() if name in batch.schema.names
        }
        left_out: dict[str, int] = {}
        kept = np.ones(batch.num_rows, dtype=bool)

        def keep(chosen: Array, reason: str) -> None:
            number = int(chosen.size - np.count_nonzero(chosen))
            if number:
                left_out[reason] = number
                np.logical_and(kept, chosen, out=kept)

        made: dict[str, Any] = {}
        for role in ("user", "item"):
            ids = id_column(column[role])
            made[role] = ids.cast(pa.string()) if role in self.text else ids
            if ids.null_count:
                keep(np.asarray(ids.is_valid()), f"no {self.roles[role]}")
        if self.splits:
            given = split_numbers(column["split"], self.roles["split"]) if self.split is None else self.split
            made["split"] = np.broadcast_to(np.asarray(given, dtype=np.int8), batch.num_rows)
        row = before + start + np.arange(batch.num_rows)
        if "time" in column:
            made["time"], missing = microseconds(column["time"], self.unit or "s", self.roles["time"])
            check_one_unit(made["time"], self.unit or "s", self.roles["time"])
            keep(~missing, f"no {self.roles['time']}")
        else:  # the order of the rows, with the given splits one after the other
            made["time"] = row + (made["split"].astype(np.int64) << 42) if self.splits else row
        if self.min_rating is not None:
            rating = numbers_of(column["rating"], self.roles["rating"])
            keep(rating >= self.min_rating, f"{self.roles['rating']} below {self.min_rating:g} or missing")
        if "weight" in column:
            weight = numbers_of(column["weight"], self.roles["weight"])
            if (weight < 0).any():
                raise ValueError(
                    f"column {self.roles['weight']!r} has the weight {weight.min():g}; weights must be >= 0"
                )
            made["weight"] = weight.astype(np.float32)
            keep(weight > 0, f"{self.roles['weight']} 0 or missing")
        if self.context:
            made |= {"row": row, **{f".{name}": one_chunk(batch.column(name)) for name in self.context}}
        rows = pa.record_batch({name: pa.array(values) for name, values in made.items()})
        return rows if kept.all() else rows.filter(pa.array(kept)), left_out
