"""The signature of an exported model: names, types and axes of its inputs. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recsys_topk.tabular.schema import Part, Schema

# The fields of a batch with the ids and the values of each part.
FIELDS: dict[Part, tuple[str, str]] = {
    "request": ("request", "request_values"),
    "history": ("history", "history_values"),
    "items": ("items", "item_values"),
}


@dataclass(frozen=True)
class Input:
    """An input of an exported model."""

    name: str  # name of the input, the same as the field of `CascadeBatch`
    dtype: str  # "int64" or "float32"
    axes: tuple[str | int, ...]  # per axis, its name if the length is dynamic, otherwise its length


def inputs_of(schema: Schema, parts: Sequence[Part], lists: bool = False) -> list[Input]:
    """Return the inputs of a model that reads the given parts of a schema. A part without features has no inputs.

    With `lists`, items are lists, (batch, items, columns), one per request; otherwise rows, (items, columns).

    Example:
        >>> from recsys_topk.tabular.schema import Feature, Table
        >>> schema = Schema((Table("video", 9),), (Feature("age", kind="numeric"),), (), (Feature("id", "video"),))
        >>> [(one.name, one.axes) for one in inputs_of(schema, ("request", "items"), lists=True)]
        [('request_values', ('batch', 1)), ('items', ('batch', 'items', 1))]
    """
    rows: dict[Part, tuple[str, ...]] = {
        "request": ("batch",),
        "history": ("batch", "views"),
        "items": ("batch", "items") if lists else ("items",),
    }
    found = []
    for part in parts:
        ids, values = FIELDS[part]
        for name, dtype, columns in (
            (ids, "int64", schema.id_columns(part)),
            (values, "float32", schema.value_columns(part)),
        ):
            width = max((column.stop for column in columns.values()), default=0)
            if width:
                found.append(Input(name, dtype, (*rows[part], width)))
        if part == "history" and schema.history:
            found.append(Input("history_length", "int64", ("batch",)))
    return found
