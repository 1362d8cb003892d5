"""Which feature reads which table, in which collection, and where its embedding stands in the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from recsys_topk.datamodules.schema import Part, Schema, Table

# The order of the parts in names of collections, which are state-dict keys.
PARTS: tuple[Part, ...] = ("request", "items", "history")
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Use:
    """A feature that reads a table.

    Attributes:
        columns: Its columns among the ids of its part.
        table: The table.
        number: How many features of the same part before it read the same table.
        bag: The embeddings of its ids are averaged.
    """

    columns: slice
    table: Table
    number: int
    bag: bool

    @property
    def key(self) -> str:
        """What TorchRec calls the feature: the table's name, with a number from the second use on."""
        return _key(self.table, self.number)


class Layout:
    """How the features of a schema are grouped into collections, and in which order they stand in the output.

    Requests (B rows), pool items (M rows) and histories (B L rows) differ in their number of rows, so the tables are
    grouped by which of the three read them; each group is one collection. In the output of a part the features that
    items and history share come first, then the other features with tables, then the values.

    Args:
        schema: The features.
        dims: Embedding dimension by table name.

    Attributes:
        groups: The tables of each collection, by the parts that read them.
        keys: What TorchRec calls the features of each collection, and their tables.
        uses: The features of each part that read tables, in the order of the output.
        dims: Width of the output of each part, values included.
        values: Number of values (numeric features and vectors) of each part.
        shared_dim: Width of what items share with the history.
    """

    def __init__(self, schema: Schema, dims: Mapping[str, int]) -> None:
        found = {part: _uses(schema, part) for part in PARTS}
        self.table_dims = dict(dims)
        self.groups = _group_tables(schema)
        numbers = {part: Counter(use.table.name for use in found[part]) for part in PARTS}
        self.keys = {parts: _keys(tables, parts, numbers) for parts, tables in self.groups.items()}
        order = [key for keys in self.keys.values() for key in keys]
        shared = {use.key for use in found["items"]} & {use.key for use in found["history"]}
        self.uses = {
            part: sorted(uses, key=lambda use: (use.key not in shared, order.index(use.key)))
            for part, uses in found.items()
        }
        self.values = {
            part: sum(columns.stop - columns.start for columns in schema.value_columns(part).values()) for part in PARTS
        }
        self.dims = {part: sum(self.dim(use) for use in self.uses[part]) + self.values[part] for part in PARTS}
        self.shared_dim = sum(self.dim(use) for use in self.uses["items"] if use.key in shared)
        self.selections = {part: self._selection(part) for part in PARTS}

    def dim(self, use: Use) -> int:
        """Return the width of a feature's embedding."""
        return self.table_dims[use.table.name]

    def use(self, part: Part, key: str) -> Use | None:
        """Return the feature of a part that is called `key`, or None."""
        return next((use for use in self.uses[part] if use.key == key), None)

    def has_bags(self, parts: Parts) -> bool:
        """Return whether a feature of these parts is a bag whose table belongs to their collection."""
        keys = self.keys[parts]
        return any(use.bag for part in parts for use in self.uses[part] if use.key in keys)

    def _selection(self, part: Part) -> list[int] | None:
        """Return which columns of all keys of a part's collections its features are, or None if all in this order."""
        start, columns = 0, {}
        for parts, keys in self.keys.items():
            if part in parts:
                for key, table in keys.items():
                    columns[key] = range(start, start + self.table_dims[table.name])
                    start += self.table_dims[table.name]
        chosen = [column for use in self.uses[part] for column in columns[use.key]]
        return None if chosen == list(range(start)) else chosen


def _uses(schema: Schema, part: Part) -> list[Use]:
    before: Counter[str] = Counter()
    columns = schema.id_columns(part)
    found = []
    for feature in schema.features(part):
        if feature.table is not None:
            table = schema.table(feature.table)
            found.append(Use(columns[feature.name], table, before[table.name], feature.kind == "bag"))
            before[table.name] += 1
    return found


def _key(table: Table, number: int) -> str:
    return table.name if number == 0 else f"{table.name}:{number}"


def _keys(tables: list[Table], parts: Parts, numbers: Mapping[Part, Counter[str]]) -> dict[str, Table]:
    most = {table.name: max(numbers[part][table.name] for part in parts) for table in tables}
    return {_key(table, number): table for table in tables for number in range(most[table.name])}


def _group_tables(schema: Schema) -> dict[Parts, list[Table]]:
    """Group the tables by the parts that read them, the history's first, each in the order of first use."""
    users: dict[str, set[Part]] = {}
    for part in ("history", "items", "request"):
        for feature in schema.features(part):
            if feature.table is not None:
                users.setdefault(feature.table, set()).add(part)
    groups: dict[Parts, list[Table]] = {}
    for table, parts in users.items():
        groups.setdefault(tuple(part for part in PARTS if part in parts), []).append(schema.table(table))
    return groups
