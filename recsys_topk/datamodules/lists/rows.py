"""Clean rows of logged lists: labels, groups, times and splits as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.labels import StageTable, graded
from recsys_topk.tabular.tables.columns import id_column, numbers_of, one_chunk, split_numbers
from recsys_topk.tabular.tables.times import check_one_unit, microseconds
from recsys_topk.types import Array


@dataclass(frozen=True)
class ListCleaner:
    """Cleans record batches of logged lists; see `Clean`.

    The rows have the columns ``__request`` and ``__item`` (ids), ``__label``, ``__group``, ``__time`` (microseconds, 0
    if there is none), ``__split`` (-1 = not known), ``__row`` (counted over all sources), and the columns of features.

    Attributes:
        roles: The column of each role.
        text: The roles, of request and item, whose ids are stored as text.
        features: The columns of features, of the history and of the user.
        stages: The labels of stages; None = labels come from a column.
        unit: The unit of time; None = there are no times.
        split: The split number of all rows; None = from the split column, or not known.
    """

    roles: Mapping[str, str]
    text: Sequence[str]
    features: Sequence[str]
    stages: StageTable | None
    unit: str | None
    split: int | None

    @property
    def columns(self) -> list[str]:
        """The columns to read."""
        return [*self.roles.values(), *self.features]

    def __call__(self, batch: Any, start: int, before: int) -> tuple[Any, dict[str, int]]:
        """Return the rows whose stage has a label."""
        columns = {role: one_chunk(batch.column(name)) for role, name in self.roles.items()}
        number, roles = batch.num_rows, self.roles
        row = before + start + np.arange(number)
        made: dict[str, Any] = {"__item": row, "__row": row}
        for role in ("request", "item"):
            if role in columns:
                ids = id_column(columns[role])
                self._present(np.asarray(ids.is_null()), role, "value")
                made[f"__{role}"] = ids.cast(pa.string()) if role in self.text else ids
        group = np.zeros(number, dtype=np.int8)
        if self.stages is None and "label" not in columns:  # all labels come from feedback
            made["__label"] = np.zeros(number, dtype=np.float32)
        elif self.stages is None:
            made["__label"] = graded(columns["label"], roles["label"], start)
        else:
            position = numbers_of(columns["position"], roles["position"]) if "position" in columns else None
            made["__label"], group = self.stages.apply(
                columns["stage"], position, roles["stage"], roles.get("position", "position")
            )
        made["__group"], made["__time"] = group, np.zeros(number, dtype=np.int64)
        if "time" in columns:
            made["__time"], missing = microseconds(columns["time"], self.unit or "s", roles["time"])
            check_one_unit(made["__time"], self.unit or "s", roles["time"])
            self._present(missing, "time", "time")
        made["__split"] = np.full(number, -1 if self.split is None else self.split, dtype=np.int8)
        if "split" in columns:
            made["__split"] = split_numbers(columns["split"], roles["split"])
        made |= {name: one_chunk(batch.column(name)) for name in self.features}
        rows = pa.record_batch({name: pa.array(values) for name, values in made.items()})
        return rows if (group >= 0).all() else rows.filter(pa.array(group >= 0)), {}

    def _present(self, missing: Array, role: str, what: str) -> None:
        if missing.any():
            raise ValueError(f"column {self.roles[role]!r} has no {what}; every row needs one")
