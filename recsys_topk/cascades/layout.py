"""Layout of embeddings: the table and collection that each feature reads, and its position in the output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from recsys_topk.tabular.schema import Part, Schema, Table

# The order of the parts in the names of collections. These names are state-dict keys.
PARTS: tuple[Part, ...] = ("request", "items", "history")
Parts = tuple[Part, ...]
WIDEST = 64  # largest embedding dimension that is chosen by the number of rows
LARGEST = 65536  # largest embedding dimension


@dataclass(frozen=True)
class Use:
    """A feature that reads a table.

    Attributes:
        columns: Columns of the feature in the ids of its part.
        table: The table.
        number: Number of earlier features of the same part that read the same table.
        bag: Whether the embeddings of its ids are averaged.
    """

    columns: slice
    table: Table
    number: int
    bag: bool

    @property
    def key(self) -> str:
        """Name of the feature in TorchRec: the name of the table, with a number from the second use on."""
        return _key(self.table, self.number)


class EmbeddingLayout:
    """The grouping of the features of a schema into collections, and their order in the output.

    Requests (B rows), pool items (M rows) and histories (B L rows) have different numbers of rows. The tables are
    therefore grouped by the parts that read them, and each group is one collection. The output of a part starts with
    the features that items and history share, then the other features with tables, then the values.

    Args:
        schema: The features.
        dims: Embedding dimension by table name.
        only: Name of a feature; the layout then has this feature of history and items only. None = all features.

    Attributes:
        groups: The tables of each collection, by the parts that read them.
        keys: TorchRec names of the features of each collection, with their tables.
        uses: The features of each part that read tables, in the order of the output.
        dims: Width of the output of each part, including values.
        values: Number of values (numeric features and vectors, without ages) of each part.
        has_ages: Whether the last value of a view is its age, which is not part of the output.
        shared_dim: Width of the features that items and history share.
        shared_item: Columns of the first categorical feature that items and history share, in the ids of the items and
            of the history, and the number of rows of its table; None if there is none.
        history_padding: The padding id of each column of the history.
    """

    def __init__(self, schema: Schema, dims: Mapping[str, int], only: str | None = None) -> None:
        uses = {part: _uses(schema, part, only) for part in PARTS}
        self.table_dims = dict(dims)
        self.groups = _group_tables(uses)
        numbers = {part: Counter(use.table.name for use in uses[part]) for part in PARTS}
        self.keys = {parts: _keys(tables, parts, numbers) for parts, tables in self.groups.items()}
        order = [key for keys in self.keys.values() for key in keys]
        shared = {use.key for use in uses["items"]} & {use.key for use in uses["history"]}
        self.uses = {
            part: sorted(part_uses, key=lambda use: (use.key not in shared, order.index(use.key)))
            for part, part_uses in uses.items()
        }
        self.has_ages = schema.has_ages
        self.history_padding = schema.padding("history")
        pairs = ((item, view) for item in self.uses["items"] for view in self.uses["history"] if item.key == view.key)
        self.shared_item = next(
            ((item.columns.start, view.columns.start, item.table.rows) for item, view in pairs if not item.bag), None
        )
        self.values = {
            part: sum(f.size for f in schema.features(part) if f.kind in ("numeric", "vector") and not only)
            for part in PARTS
        }
        self.dims = {part: sum(self.dim(use) for use in self.uses[part]) + self.values[part] for part in PARTS}
        self.shared_dim = sum(self.dim(use) for use in self.uses["items"] if use.key in shared)
        self.selections = {part: self._selection(part) for part in PARTS}

    def dim(self, use: Use) -> int:
        """Return the width of a feature's embedding."""
        return self.table_dims[use.table.name]

    def use(self, part: Part, key: str) -> Use | None:
        """Return the feature of a part with the TorchRec name `key`, or None."""
        return next((use for use in self.uses[part] if use.key == key), None)

    def has_bags(self, parts: Parts) -> bool:
        """Return whether the collection of these parts has a bag feature."""
        keys = self.keys[parts]
        return any(use.bag for part in parts for use in self.uses[part] if use.key in keys)

    def _selection(self, part: Part) -> list[int] | None:
        """Return the columns of a part's features in the output of its collections; None = all columns in order."""
        start, columns = 0, {}
        for parts, keys in self.keys.items():
            if part in parts:
                for key, table in keys.items():
                    columns[key] = range(start, start + self.table_dims[table.name])
                    start += self.table_dims[table.name]
        selection = [column for use in self.uses[part] for column in columns[use.key]]
        return None if selection == list(range(start)) else selection


def _uses(schema: Schema, part: Part, only: str | None) -> list[Use]:
    earlier: Counter[str] = Counter()
    columns = schema.id_columns(part)
    uses = []
    for feature in schema.features(part):
        if feature.table is not None and (only is None or (feature.name == only and part != "request")):
            table = schema.table(feature.table)
            uses.append(Use(columns[feature.name], table, earlier[table.name], feature.kind == "bag"))
            earlier[table.name] += 1
    return uses


def _key(table: Table, number: int) -> str:
    return table.name if number == 0 else f"{table.name}:{number}"


def _keys(tables: list[Table], parts: Parts, numbers: Mapping[Part, Counter[str]]) -> dict[str, Table]:
    most = {table.name: max(numbers[part][table.name] for part in parts) for table in tables}
    return {_key(table, number): table for table in tables for number in range(most[table.name])}


def _group_tables(uses: Mapping[Part, list[Use]]) -> dict[Parts, list[Table]]:
    """Group the tables by the parts that read them. Tables of the history come first, then by first use."""
    readers: dict[Table, set[Part]] = {}
    for part in ("history", "items", "request"):
        for use in uses[part]:
            readers.setdefault(use.table, set()).add(part)
    groups: dict[Parts, list[Table]] = {}
    for table, parts in readers.items():
        groups.setdefault(tuple(part for part in PARTS if part in parts), []).append(table)
    return groups


def dimensions(schema: Schema, dim: int | Mapping[str, int] | Literal["auto"]) -> dict[str, int]:
    """Return the embedding dimension of each table. Raise if `dim` does not contain it.

    With ``"auto"`` it is the square root of the number of rows, as a multiple of 8 of at most 64.
    """
    names = [table.name for table in schema.tables]
    if dim == "auto":
        return {table.name: min(WIDEST, 8 * math.ceil(math.sqrt(table.rows) / 8)) for table in schema.tables}
    if isinstance(dim, int):
        dim = {"default": dim}
    wrong = {name: value for name, value in dim.items() if not 1 <= value <= LARGEST}
    if wrong:
        raise ValueError(f"embedding dimensions must be at most {LARGEST} and at least 1, got {wrong}")
    unknown = set(dim) - {*names, "default"}
    if unknown:
        raise ValueError(f"embedding dimensions name unknown tables {sorted(unknown)}; the schema has {names}")
    missing = [name for name in names if name not in dim and "default" not in dim]
    if missing:
        raise ValueError(f"no embedding dimension for tables {missing}; add them or a 'default'")
    return {name: dim.get(name, dim.get("default", 0)) for name in names}


def untie_history(schema: Schema, dims: Mapping[str, int]) -> tuple[Schema, dict[str, int]]:
    """Return a schema whose history has separate tables, named ``history:TABLE``, and the width of each table."""
    read = {feature.table for part in (schema.request, schema.items) for feature in part}
    shared = [table for table in schema.tables if table.name in read & {feature.table for feature in schema.history}]
    names = {table.name: f"history:{table.name}" for table in shared}
    copies = [replace(table, name=names[table.name]) for table in shared]
    history = tuple(replace(feature, table=names.get(str(feature.table), feature.table)) for feature in schema.history)
    widths = {name: dims[table] for table, name in names.items()}
    return replace(schema, tables=(*schema.tables, *copies), history=history), {**dims, **widths}
