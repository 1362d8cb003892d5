"""What the columns of a batch mean: features, the embedding tables they index, sizes and padding ids."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """An embedding table: `rows` ids, of which `padding` stands for "nothing" and has no embedding."""

    name: str
    rows: int
    padding: int = 0


@dataclass(frozen=True)
class Feature:
    """A column of ids and the table that the ids index."""

    name: str
    table: str


@dataclass(frozen=True)
class Schema:
    """The features of requests, histories and items, in column order.

    Attributes:
        tables: All tables; features of several kinds may share one.
        request: Columns of `CascadeBatch.request`.
        history: Columns of `CascadeBatch.history`.
        items: Columns of `CascadeBatch.items`.
        groups: Names of the sample groups, best first.
        positive_above: Labels above this are positives.

    Example:
        >>> schema = Schema(
        ...     tables=(Table("user", 100), Table("video", 1000)),
        ...     request=(Feature("user_id", "user"),),
        ...     history=(Feature("video_id", "video"),),
        ...     items=(Feature("video_id", "video"),),
        ... )
        >>> Schema.from_dict(schema.to_dict()) == schema
        True
    """

    tables: tuple[Table, ...]
    request: tuple[Feature, ...]
    history: tuple[Feature, ...]
    items: tuple[Feature, ...]
    groups: tuple[str, ...] = ()
    positive_above: float = 0.0

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must differ, got {names}")
        for feature in (*self.request, *self.history, *self.items):
            if feature.table not in names:
                raise ValueError(f"feature {feature.name!r} names table {feature.table!r}; there are {names}")

    def table(self, name: str) -> Table:
        """Return the table called `name`."""
        return next(table for table in self.tables if table.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers, as stored in checkpoints."""
        plain = asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Schema:
        """Rebuild a schema from `to_dict`."""
        return cls(
            tables=tuple(Table(**table) for table in plain["tables"]),
            request=tuple(Feature(**feature) for feature in plain["request"]),
            history=tuple(Feature(**feature) for feature in plain["history"]),
            items=tuple(Feature(**feature) for feature in plain["items"]),
            groups=tuple(plain.get("groups", ())),
            positive_above=float(plain.get("positive_above", 0.0)),
        )
