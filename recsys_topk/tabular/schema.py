"""The schema of a batch: features of four kinds, their embedding tables, and the meaning of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FeatureKind = Literal["categorical", "bag", "numeric", "vector", "age"]
LabelKind = Literal["grades", "places"]
Part = Literal["request", "history", "items"]

PARTS: tuple[Part, ...] = ("request", "history", "items")
ID_KINDS: tuple[FeatureKind, ...] = ("categorical", "bag")
VALUE_KINDS: tuple[FeatureKind, ...] = ("numeric", "vector", "age")
VERSION = 2

VARIANT = 1 << 40
"""Item ids from this value on are variants: item ``id % VARIANT`` with other features in the same shard."""


@dataclass(frozen=True)
class Table:
    """An embedding table.

    Attributes:
        name: Name of the table.
        rows: Number of rows.
        padding: The padding id, which has no embedding.
        vocabulary: Fingerprint of the `Vocabulary` that maps raw ids to rows; None = the data contain the rows
            directly. A model cannot be used with another vocabulary, so schemas with different fingerprints are not
            equal.
    """

    name: str
    rows: int
    padding: int = 0
    vocabulary: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Feature:
    """One feature of a request, of a history view or of an item.

    Attributes:
        name: Name of the feature, unique within its part of the schema.
        table: The embedding table of the ids; None for numeric features and vectors.
        kind: ``"categorical"`` (one id), ``"bag"`` (up to `size` ids of one table, whose embeddings are averaged),
            ``"numeric"`` (one float), ``"vector"`` (`size` floats) or ``"age"`` (seconds from a view to the request:
            the last feature of a history, which only history encoders read).
        size: Number of columns: 1 for categorical and numeric features, the maximum number of ids of a bag, or the
            length of a vector.

    Example:
        >>> Feature("genres", "genre", "bag", 4).size
        4
        >>> Feature("price", kind="numeric").table is None
        True
    """

    name: str
    table: str | None = None
    kind: FeatureKind = "categorical"
    size: int = 1

    def __post_init__(self) -> None:
        if self.kind not in (*ID_KINDS, *VALUE_KINDS):
            raise ValueError(
                f"feature {self.name!r} has kind {self.kind!r}; available: {', '.join((*ID_KINDS, *VALUE_KINDS))}"
            )
        if self.kind in ID_KINDS and self.table is None:
            raise ValueError(f"feature {self.name!r} is {self.kind}, so it needs a table; give Feature(name, table)")
        if self.kind in VALUE_KINDS and self.table is not None:
            raise ValueError(f"feature {self.name!r} is {self.kind} and takes no table, got {self.table!r}")
        if self.size < 1 or (self.size > 1 and self.kind in ("categorical", "numeric", "age")):
            raise ValueError(f"feature {self.name!r} is {self.kind} and cannot have size {self.size}")


@dataclass(frozen=True)
class Outline:
    """What is known of a schema before the data are prepared.

    Attributes:
        parts: The parts that have features.
        groups: See `Schema`.
        positive_above: See `Schema`.
        labels: See `Schema`.
    """

    parts: frozenset[Part]
    groups: tuple[str, ...] = ()
    positive_above: float = 0.0
    labels: LabelKind = "grades"


@dataclass(frozen=True)
class Schema:
    """The features of requests, histories and items, in column order, and the meaning of the labels.

    The ids of a part (`CascadeBatch.request`, `.history`, `.items`) contain its categorical features and bags, in the
    order of the schema. The values of a part (`CascadeBatch.request_values`, ...) contain its numeric features and
    vectors.

    Attributes:
        tables: All tables; features of several parts may share one.
        request: Features of a request.
        history: Features of each view in the user's history.
        items: Features of an item.
        groups: Names of the sample groups, best first.
        positive_above: Labels above this are positives.
        labels: ``"grades"`` (a label is the relevance of an item, e.g. 0 to 4) or ``"places"`` (labels only order the
            items, e.g. 29 for the first place and 20 for the tenth). Graded losses use it to choose their gain.
        list_length: The median length of logged lists without sampled negatives; 0 = unknown. It only chooses defaults
            (`default_stages`), so schemas that differ in it are equal.

    Example:
        >>> schema = Schema(
        ...     tables=(Table("user", 100), Table("video", 1000), Table("genre", 20)),
        ...     request=(Feature("user_id", "user"), Feature("age", kind="numeric")),
        ...     history=(Feature("video_id", "video"),),
        ...     items=(Feature("video_id", "video"), Feature("genres", "genre", "bag", 3)),
        ... )
        >>> Schema.from_dict(schema.to_dict()) == schema
        True
        >>> schema.id_columns("items"), schema.value_columns("request")
        ({'video_id': slice(0, 1, None), 'genres': slice(1, 4, None)}, {'age': slice(0, 1, None)})
    """

    tables: tuple[Table, ...]
    request: tuple[Feature, ...]
    history: tuple[Feature, ...]
    items: tuple[Feature, ...]
    groups: tuple[str, ...] = ()
    positive_above: float = 0.0
    labels: LabelKind = "grades"
    list_length: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must differ, got {names}")
        if self.labels not in ("grades", "places"):
            raise ValueError(f"labels must be 'grades' or 'places', got {self.labels!r}")
        if any(one.kind == "age" for one in (*self.request, *self.items, *self.history[:-1])):
            raise ValueError("a feature of kind 'age' must be the last feature of the history")
        for part in PARTS:
            features = self.features(part)
            if len({feature.name for feature in features}) != len(features):
                raise ValueError(f"{part} features must differ in name, got {[feature.name for feature in features]}")
            for feature in features:
                if feature.table is not None and feature.table not in names:
                    raise ValueError(f"feature {feature.name!r} names table {feature.table!r}; there are {names}")

    @property
    def has_ages(self) -> bool:
        """Whether the history has the ages of its views."""
        return bool(self.history) and self.history[-1].kind == "age"

    @property
    def outline(self) -> Outline:
        """What is known before the data are prepared: no names and sizes of features and tables."""
        parts = frozenset(part for part in PARTS if self.features(part))
        return Outline(parts, self.groups, self.positive_above, self.labels)

    def features(self, part: Part) -> tuple[Feature, ...]:
        """Return the features of a part."""
        found: tuple[Feature, ...] = getattr(self, part)
        return found

    def id_columns(self, part: Part) -> dict[str, slice]:
        """Return the columns of each categorical feature and bag in the ids of a part, by name."""
        return _columns(self.features(part), ID_KINDS)

    def value_columns(self, part: Part) -> dict[str, slice]:
        """Return the columns of each numeric feature and vector in the values of a part, by name."""
        return _columns(self.features(part), VALUE_KINDS)

    def padding(self, part: Part) -> list[int]:
        """Return the padding id of each column of the ids of a part."""
        tables = [(self.table(one.table), one.size) for one in self.features(part) if one.table is not None]
        return [table.padding for table, size in tables for _ in range(size)]

    def table(self, name: str) -> Table:
        """Return the table with the given name."""
        return next(table for table in self.tables if table.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain lists, dicts, strings and numbers, as stored in checkpoints."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        for table in plain["tables"]:
            if table["vocabulary"] is None:
                del table["vocabulary"]  # as in files of versions without vocabularies
        if not self.list_length:
            del plain["list_length"]
        return {"version": VERSION, **plain}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Schema:
        """Build a schema from the result of `to_dict`, of this version or of version 1 (categorical features only)."""
        version = plain.get("version", 1)
        if version not in (1, VERSION):
            raise ValueError(f"the schema has version {version!r}; this release reads versions 1 and {VERSION}")
        return cls(
            tables=tuple(Table(**table) for table in plain["tables"]),
            request=tuple(Feature(**feature) for feature in plain["request"]),
            history=tuple(Feature(**feature) for feature in plain["history"]),
            items=tuple(Feature(**feature) for feature in plain["items"]),
            groups=tuple(plain.get("groups", ())),
            positive_above=float(plain.get("positive_above", 0.0)),
            # Version 1 supported only RecFlow, whose labels are places.
            labels=plain.get("labels", "places" if version == 1 else "grades"),
            list_length=int(plain.get("list_length", 0)),
        )


def _columns(features: tuple[Feature, ...], kinds: tuple[FeatureKind, ...]) -> dict[str, slice]:
    found: dict[str, slice] = {}
    start = 0
    for feature in features:
        if feature.kind in kinds:
            found[feature.name] = slice(start, start + feature.size)
            start += feature.size
    return found
