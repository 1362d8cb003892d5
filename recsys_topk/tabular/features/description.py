"""The description of the features in a user's tables, as YAML or plain dicts. It needs no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from recsys_topk.registry import suggest
from recsys_topk.tabular.ids.options import VocabularyOptions

RawKind = Literal["categorical", "bag", "numeric", "vector", "time"]
Transform = Literal["none", "standardise", "log", "bucketise"]
TimePart = Literal["hour", "weekday", "day", "month", "minute"]
DataPart = Literal["user", "context", "items", "history"]

DATA_PARTS: Final[tuple[DataPart, ...]] = get_args(DataPart)
TIME_ROWS: Final[dict[str, int]] = {"hour": 24, "weekday": 7, "day": 31, "month": 12, "minute": 60}
"""Number of values of each part of a time."""

_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "table": ((str, type(None)), "a name"),
    "size": ((int, type(None)), "a whole number"),
    "buckets": (int, "a whole number"),
    "missing": ((bool, type(None)), "true or false"),
    "utc_offset": ((int, float), "a number of hours"),
    "separator": (str, "text"),
}


@dataclass(frozen=True)
class RawFeature:
    """A feature as the user describes it: its columns and how they are encoded.

    Attributes:
        name: Name of the feature.
        kind: ``"categorical"`` (one id), ``"bag"`` (several ids: a list, or text with `separator`), ``"numeric"``,
            ``"vector"`` (a list of numbers, text with `separator`, or several columns) or ``"time"``.
        columns: The columns of the feature: one, or several for a vector.
        table: Table of a categorical feature or bag. Features with the same table share its embeddings.
        size: Maximum number of ids of a bag, or length of a vector; None = taken from the training data (at most 32
            for a bag).
        transform: Transform of numeric features and vectors: ``"none"``, ``"standardise"`` (mean 0, variance 1),
            ``"log"`` (sign(x) log(1 + abs(x)), then standardised) or ``"bucketise"`` (a categorical feature of
            `buckets` quantiles; not for vectors).
        buckets: Number of buckets.
        missing: Whether to add a column that is 1 where the value is missing; None = add it if values are missing in
            the training data.
        parts: Parts of a time; each becomes a categorical feature.
        utc_offset: Offset of the wanted time zone from UTC in hours.
        separator: Separator between the ids of a bag, or the numbers of a vector, in text.

    Example:
        >>> RawFeature.from_plain("price", {"kind": "numeric", "transform": "log"}).columns
        ('price',)
        >>> RawFeature.from_plain("genres", "bag").table
        'genres'
    """

    name: str
    kind: RawKind
    columns: tuple[str, ...]
    table: str | None = None
    size: int | None = None
    transform: Transform = "standardise"
    buckets: int = 16
    missing: bool | None = None
    parts: tuple[TimePart, ...] = ("hour", "weekday")
    utc_offset: float = 0.0
    separator: str = " "

    def __post_init__(self) -> None:
        for option, (types, what) in _TYPES.items():
            value = getattr(self, option)
            if not isinstance(value, types) or (isinstance(value, bool) and option != "missing"):
                raise ValueError(f"feature {self.name!r} has {option} {value!r:.60}; it must be {what}")
        if not all(isinstance(column, str) for column in self.columns):
            raise ValueError(f"feature {self.name!r} has columns {list(self.columns)!r:.60}; they must be names")
        _one_of(self.kind, get_args(RawKind), f"the kind of feature {self.name!r}")
        _one_of(self.transform, get_args(Transform), f"the transform of feature {self.name!r}")
        for part in self.parts:
            _one_of(part, get_args(TimePart), f"a part of the time {self.name!r}")
        if self.table is None and self.kind in ("categorical", "bag"):
            object.__setattr__(self, "table", self.name)
        if self.table is not None and self.kind not in ("categorical", "bag"):
            raise ValueError(f"feature {self.name!r} is {self.kind} and takes no table, got {self.table!r}")
        if len(self.columns) != 1 and self.kind != "vector":
            raise ValueError(f"feature {self.name!r} is {self.kind} and takes one column, got {list(self.columns)}")
        if self.buckets < 2:
            raise ValueError(f"feature {self.name!r} needs at least 2 buckets, got {self.buckets}")
        if self.size is not None and self.size < 1:
            raise ValueError(f"feature {self.name!r} cannot have size {self.size}")
        if self.kind == "vector" and self.transform == "bucketise":
            raise ValueError(f"feature {self.name!r} is a vector, which cannot be bucketised")

    @classmethod
    def from_plain(cls, name: str, plain: Any) -> RawFeature:
        """Build a feature from its plain description: a kind, or a mapping with the key ``kind``."""
        given = {"kind": plain} if isinstance(plain, str) else plain
        if not isinstance(given, Mapping):
            raise ValueError(f"feature {name!r} must be a kind or a mapping with a kind, got {plain!r:.60}")
        known = [one.name for one in fields(cls) if one.name not in ("name", "columns")]
        for key in given:
            if key not in (*known, "column", "columns"):
                raise ValueError(
                    f"feature {name!r} has no option {key!r}; {suggest(str(key), known)}it has: {', '.join(known)}"
                )
        if "kind" not in given:
            raise ValueError(f"feature {name!r} has no kind; available: {', '.join(get_args(RawKind))}")
        options: dict[str, Any] = {key: value for key, value in given.items() if key not in ("column", "columns")}
        columns = given.get("columns", given.get("column", name))
        options["columns"] = tuple(columns) if isinstance(columns, (list, tuple)) else (columns,)
        if "parts" in options:
            parts = options["parts"]
            options["parts"] = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)
        return cls(name, **options)

    def to_plain(self) -> dict[str, Any]:
        """Return the plain description of the feature: its kind and the options that differ from the defaults."""
        plain: dict[str, Any] = {"kind": self.kind}
        if self.columns != (self.name,):
            plain |= {"column": self.columns[0]} if len(self.columns) == 1 else {"columns": list(self.columns)}
        if self.table is not None and self.table != self.name:
            plain["table"] = self.table
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in ("name", "kind", "columns", "table") and value != one.default:
                plain[one.name] = list(value) if isinstance(value, tuple) else value
        return plain


@dataclass(frozen=True)
class Description:
    """The features of users, contexts, items and histories, and the vocabulary of each table.

    Attributes:
        user: Features of the user, from a users table or from the rows that name the user.
        context: Features of the request itself, e.g. its time or the device.
        items: Features of an item.
        history: Features of each view of the history: names of item features, or separate descriptions.
        tables: Vocabulary options by table (`VocabularyOptions`); compact for tables that are not listed.

    Example:
        >>> described = Description.from_plain({
        ...     "user": {"user_id": "categorical", "age": {"kind": "numeric", "transform": "log"}},
        ...     "items": {"item_id": "categorical", "genres": "bag"},
        ...     "history": ["item_id"],
        ... })
        >>> [feature.name for feature in described.part("history")]
        ['item_id']
        >>> Description.from_plain(described.to_plain()) == described
        True
    """

    user: tuple[RawFeature, ...] = ()
    context: tuple[RawFeature, ...] = ()
    items: tuple[RawFeature, ...] = ()
    history: tuple[RawFeature, ...] = ()
    tables: Mapping[str, VocabularyOptions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        requests = [feature.name for feature in (*self.user, *self.context)]
        for part, names in (("request", requests), ("items", [feature.name for feature in self.items])):
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(f"two {part} features are called {repeated[0]!r}; rename one of them")

    def part(self, name: DataPart) -> tuple[RawFeature, ...]:
        """Return the features of a part."""
        found: tuple[RawFeature, ...] = getattr(self, name)
        return found

    def table(self, name: str) -> VocabularyOptions:
        """Return the vocabulary options of a table."""
        return self.tables.get(name, VocabularyOptions("compact"))

    def columns(self, part: DataPart) -> list[str]:
        """Return the columns that the features of a part use."""
        return list(dict.fromkeys(column for feature in self.part(part) for column in feature.columns))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Description:
        """Build a description from plain values, e.g. the content of a YAML file."""
        known = (*DATA_PARTS, "tables")
        for key in plain:
            if key not in known:
                raise ValueError(
                    f"a description of features has no part {key!r}; {suggest(str(key), known)}it has: "
                    f"{', '.join(known)}"
                )
        parts = {part: tuple(_features(part, plain.get(part))) for part in DATA_PARTS if part != "history"}
        items = {feature.name: feature for feature in parts["items"]}
        history = plain.get("history") or ()
        if isinstance(history, Mapping):
            views = tuple(_features("history", history))
        elif not isinstance(history, (list, tuple)):
            raise ValueError(f"history must be a list of features of items, got {history!r:.60}")
        else:
            for name in history:
                if name not in items:
                    raise ValueError(
                        f"the history names {name!r}, which is not a feature of items; "
                        f"{suggest(str(name), items)}there are: {', '.join(items)}"
                    )
            views = tuple(items[name] for name in history)
        described = plain.get("tables") or {}
        if not isinstance(described, Mapping):
            raise ValueError(f"tables must map names of tables to their vocabularies, got {described!r:.60}")
        tables = {str(name): VocabularyOptions.parse(given) for name, given in described.items()}
        made = cls(**parts, history=views, tables=tables)
        used = {feature.table for part in DATA_PARTS for feature in made.part(part) if feature.table}
        for name in tables:
            if name not in used:
                raise ValueError(
                    f"tables names {name!r}, which no feature uses; {suggest(name, used)}there are: "
                    f"{', '.join(sorted(used))}"
                )
        return made

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any] | Description) -> Description:
        """Return a description, given the description itself, plain values, or the path of a YAML file."""
        if isinstance(source, Description):
            return source
        if isinstance(source, Mapping):
            return cls.from_plain(source)
        from recsys_topk.trust.documents import read_yaml_file

        if not Path(source).is_file():
            raise ValueError(f"there is no file {str(source)!r} with a description of features")
        plain = read_yaml_file(Path(source))
        if not isinstance(plain, Mapping):
            raise ValueError(f"{source} must be a mapping of parts ({', '.join(DATA_PARTS)}) to features")
        return cls.from_plain(plain)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values that `from_plain` accepts."""
        plain: dict[str, Any] = {}
        for part in DATA_PARTS:
            if not self.part(part):
                continue
            if part == "history" and all(feature in self.items for feature in self.history):
                plain[part] = [feature.name for feature in self.history]
            else:
                plain[part] = {feature.name: feature.to_plain() for feature in self.part(part)}
        if self.tables:
            plain["tables"] = {
                name: {one.name: getattr(options, one.name) for one in fields(options) if _differs(options, one)}
                for name, options in self.tables.items()
            }
        return plain


def _differs(options: VocabularyOptions, one: Any) -> bool:
    return bool(one.name == "kind" or getattr(options, one.name) != one.default)


def _features(part: str, plain: Any) -> Iterator[RawFeature]:
    if plain is None:
        return
    if isinstance(plain, Sequence) and not isinstance(plain, str):
        plain = dict.fromkeys(plain, "categorical")
    if not isinstance(plain, Mapping):
        raise ValueError(f"{part} must map names of features to their kinds, got {plain!r:.60}")
    for name, options in plain.items():
        yield RawFeature.from_plain(str(name), options)


def _one_of(value: Any, allowed: Sequence[str], what: str) -> None:
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; {suggest(str(value), allowed)}available: {', '.join(allowed)}")
