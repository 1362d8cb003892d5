"""Read the rows of a source as uniform record batches: request and item keys, label, group, time, split, features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.columns import Keys, keys_of, numbers_of, one_chunk, split_numbers
from recsys_topk.datamodules.features import DATA_PARTS
from recsys_topk.datamodules.lists.labels import graded
from recsys_topk.datamodules.lists.plan import Plan
from recsys_topk.datamodules.times import guess_unit, microseconds

Array = npt.NDArray[Any]


class RowReader:
    """Reads the sources of a plan.

    The record batches have the columns ``__request`` and ``__item`` (keys), ``__label``, ``__group``, ``__time``
    (microseconds, 0 if there is none), ``__split`` (-1 = not known), ``__row`` (counted over all sources), ``__name``
    (requests with string ids), and the columns used by features.

    Args:
        plan: What to read.

    Attributes:
        text_items: Whether the item ids are strings, known after reading.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.text_items = False
        self._item_names: dict[int, str] = {}
        self._unit: str | None = None
        self._types: dict[str, Any] = {}
        columns = [column for part in DATA_PARTS for column in plan.description.columns(part)]
        history = [plan.roles["history"]] if plan.description.history else []
        user = [plan.roles["user"]] if "user" in plan.roles else []
        self.features = list(dict.fromkeys([*columns, *history, *user]))
        told = ["label"] if plan.stages is None else ["stage", "position"][: 1 + plan.stages.needs_position]
        for role in told:
            if plan.roles.get(role) in columns:
                raise ValueError(
                    f"the {role} {plan.roles[role]!r} is described as a feature, and labels are made of it; "
                    f"take it out of the description"
                )

    def item_name(self, key: int) -> Any:
        """Return the id of an item in the source."""
        return self._item_names.get(key, str(key)) if self.text_items else key

    def batches(self, progress: Callable[[str, int, int | None], None]) -> Iterator[Any]:
        """Yield the rows of all sources, in order."""
        done = 0
        counts = [reader.rows for reader, _ in self.plan.sources]
        total = None if None in counts else sum(count or 0 for count in counts)
        text: bool | None = None
        for reader, split in self.plan.sources:
            roles = {role: name for role, name in self.plan.roles.items() if role != "split" or split is None}
            start = done
            for batch in reader.batches([*roles.values(), *self.features]):
                columns = {role: one_chunk(batch.column(name)) for role, name in roles.items()}
                request = self._present(keys_of(columns["request"]), roles["request"], reader.name, done - start)
                named = not _is_number(columns["request"].type)
                if text is not None and named != text:
                    raise ValueError(f"column {roles['request']!r} is text in one source and numbers in another")
                text = named
                made, kept = self._computed(batch.num_rows, columns, roles, reader.name, done, start)
                made |= {"__request": request, "__split": self._splits(columns.get("split"), split, batch.num_rows)}
                yield self._record_batch(batch, made, kept, columns["request"] if named else None, reader.name)
                done += batch.num_rows
                progress("read", batch.num_rows, total)

    def _computed(
        self, number: int, columns: dict[str, Any], roles: dict[str, str], name: str, done: int, start: int
    ) -> tuple[dict[str, Array], Array]:
        row = done + np.arange(number)
        item = row
        if "item" in columns:
            keys = keys_of(columns["item"])
            item = self._present(keys, roles["item"], name, done - start)
            self._remember(columns["item"], keys)
        stages = self.plan.stages
        if stages is None:
            label = graded(columns["label"], roles["label"], done - start)
            group = np.zeros(number, dtype=np.int8)
        else:
            position = numbers_of(columns["position"], roles["position"]) if "position" in columns else None
            label, group = stages.apply(columns["stage"], position, roles["stage"], roles.get("position", "position"))
        time = np.zeros(number, dtype=np.int64)
        if "time" in columns:
            self._unit = self._unit or guess_unit(columns["time"])
            time, missing = microseconds(columns["time"], self._unit, roles["time"])
            if missing.any():
                at = done - start + int(np.flatnonzero(missing)[0]) + 1
                raise ValueError(
                    f"{name}, row {at}: column {roles['time']!r} has no time; remove the row, or the column"
                )
        made = {"__item": item, "__label": label, "__group": group, "__time": time, "__row": row}
        return made, np.flatnonzero(group >= 0)

    def _present(self, keys: Keys, column: str, name: str, done: int) -> Array:
        if keys.missing.any():
            at = done + int(np.flatnonzero(keys.missing)[0]) + 1
            raise ValueError(f"{name}, row {at}: column {column!r} has no value; every row needs one")
        return keys.keys

    def _remember(self, column: Any, keys: Keys) -> None:
        if keys.text or self.text_items:
            self.text_items = True
            distinct = column.unique().cast("string")
            self._item_names.update(zip(keys_of(distinct).keys.tolist(), distinct.to_pylist(), strict=True))

    def _splits(self, column: Any, split: int | None, number: int) -> Array:
        if split is not None or column is None or self.plan.split != "column":
            return np.full(number, -1 if split is None else split, dtype=np.int8)
        return split_numbers(column, self.plan.roles["split"])

    def _record_batch(self, batch: Any, made: dict[str, Array], kept: Array, names: Any, source: str) -> Any:
        import pyarrow as pa

        columns: dict[str, Any] = {name: pa.array(column) for name, column in made.items()}
        if names is not None:
            columns["__name"] = names.cast(pa.string())
        for name in self.features:
            column = one_chunk(batch.column(name))
            kind = self._types.setdefault(name, column.type)
            if column.type != kind:
                try:
                    column = column.cast(kind, safe=False)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                    raise ValueError(
                        f"column {name!r} is {column.type} in {source} and {kind} before; make it one type"
                    ) from None
            columns[name] = column
        whole = pa.record_batch(list(columns.values()), names=list(columns))
        return whole if kept.size == whole.num_rows else whole.take(pa.array(kept))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
