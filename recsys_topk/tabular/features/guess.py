"""Guess which column is the user, the item or the time, and the kind of feature of each column."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_topk.tabular.features.description import Description, RawFeature
from recsys_topk.tabular.tables.columns import is_list, is_text, keys_of, lists_of, numbers_of, one_chunk
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.tabular.tables.times import DIGITS, guess_unit

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "user": (
        "user", "userid", "uid", "customer", "customerid", "visitor", "visitorid", "member", "memberid", "account",
        "accountid", "reviewerid", "session", "sessionid",
    ),
    "item": (
        "item", "itemid", "iid", "movie", "movieid", "film", "filmid", "product", "productid", "parentasin", "asin",
        "video", "videoid", "photoid", "article", "articleid", "news", "newsid", "track", "trackid", "song", "songid",
        "artistid", "book", "bookid", "business", "businessid", "content", "contentid", "game", "gameid", "sku", "ad",
    ),
    "time": (
        "timestamp", "time", "ts", "datetime", "eventtime", "timems", "date", "unixreviewtime", "reviewtime",
        "createdat", "requesttimestamp", "eventtimestamp", "impressiontime",
    ),
    "rating": ("rating", "ratings", "stars", "score", "overall"),
    "weight": ("weight",),
    "split": ("split", "fold", "partition"),
}  # fmt: skip
"""Column names of public data sets by role, in lower case and without punctuation."""

SAMPLE_ROWS: Final = 100_000
_FEW: Final = 200
"""A column of integers with at most this many distinct values may be categorical."""


@dataclass(frozen=True)
class Guess:
    """The guessed feature of a column.

    Attributes:
        column: The column.
        feature: The feature; None = the column is not used.
        reason: A short reason for the guess.
        distinct: Number of distinct values (for lists: distinct elements) in the inspected rows.
        missing: Fraction of missing values.
        example: An example value.
    """

    column: str
    feature: RawFeature | None
    reason: str
    distinct: int
    missing: float
    example: str

    def row(self) -> dict[str, object]:
        """Return the guess as a row of a table for display."""
        plain = {} if self.feature is None else self.feature.to_plain()
        options = ", ".join(f"{name} {value}" for name, value in plain.items() if name != "kind")
        return {
            "column": self.column,
            "kind": plain.get("kind", "left out"),
            "options": options or None,
            "distinct": self.distinct,
            "missing": f"{self.missing:.1%}",
            "example": self.example,
            "why": self.reason,
        }


@dataclass(frozen=True)
class GuessedTables:
    """The guessed content of a set of tables.

    Attributes:
        roles: The column of each role: user, item, time, rating, weight, split.
        description: The features.
        guesses: One guess per inspected column, by table, e.g. ``"interactions"``, ``"users"`` or ``"items"``.
    """

    roles: Mapping[str, str]
    description: Description
    guesses: Mapping[str, list[Guess]] = field(default_factory=dict)


def guess_roles(
    columns: Iterable[str], roles: Iterable[str] = tuple(ROLES), names: Mapping[str, tuple[str, ...]] = ROLES
) -> dict[str, str]:
    """Return the column of each role, found by its name.

    Args:
        columns: The names of the columns.
        roles: The roles to look for.
        names: Usual column names by role.

    Example:
        >>> guess_roles(["userId", "movieId", "rating", "timestamp"])
        {'user': 'userId', 'item': 'movieId', 'rating': 'rating', 'time': 'timestamp'}
    """
    plain = {re.sub(r"[^a-z0-9]", "", column.lower()): column for column in columns}
    found = {role: next((plain[name] for name in names[role] if name in plain), None) for role in roles}
    order = {column: place for place, column in enumerate(plain.values())}
    return dict(sorted(((role, name) for role, name in found.items() if name), key=lambda pair: order[pair[1]]))


def require_role(reader: TableReader, roles: Mapping[str, str], role: str, more: str = "") -> None:
    """Raise a ValueError if the column of a role is not known.

    Args:
        reader: The table.
        roles: The column of each role.
        role: The required role.
        more: What else the user can do, for the message.
    """
    if role not in roles:
        raise ValueError(
            f"{reader.name} has no column that looks like the {role}; name it: --data.{role} COLUMN{more}. It has: "
            f"{', '.join(reader.columns)}"
        )


def guess_features(reader: TableReader, leave_out: Iterable[str] = (), rows: int = SAMPLE_ROWS) -> list[Guess]:
    """Guess the feature of each column of a table from its first rows.

    Args:
        reader: The table.
        leave_out: Columns to skip.
        rows: Number of rows to inspect.
    """
    known = set(leave_out)
    head = reader.head(rows, [column for column in reader.columns if column not in known] or reader.columns[:1])
    return [guess_feature(column, head.column(column)) for column in head.column_names if column not in known]


def guess_feature(name: str, values: Any) -> Guess:
    """Guess the feature of a column.

    Args:
        name: Name of the column.
        values: The first values of the column, a pyarrow array.

    Example:
        >>> import pyarrow as pa
        >>> guess_feature("age", pa.array([20.5, 31.0, None])).feature.kind
        'numeric'
        >>> guess_feature("genres", pa.array(["Comedy|Drama", "Drama", "Comedy"])).feature.separator
        '|'
    """
    column = one_chunk(values)
    kind = column.type
    missing = column.null_count / max(len(column), 1)
    first = next((value.as_py() for value in column if value.is_valid), None)
    example = " ".join(str(first).split())
    example = example if len(example) <= 28 else example[:25] + "..."

    def guess(feature: Any, reason: str, distinct: int) -> Guess:
        made = None if feature is None else RawFeature.from_plain(name, feature)
        return Guess(name, made, reason, distinct, missing, example)

    if first is None:
        return guess(None, "no values", 0)
    if name.startswith("__index_level_"):
        return guess(None, "the index of a pandas frame", 0)
    if is_list(kind):
        return _of_lists(name, column, guess)
    if pa.types.is_temporal(kind) or (_named_like_time(name) and _looks_like_time(column)):
        return guess("time", "times", len(column.unique()))
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return guess(None, f"{kind} cannot be a feature", 0)
    keys, absent, _ = keys_of(column)
    there = keys[~absent]
    distinct = int(np.unique(there).size)
    if distinct <= 1:
        return guess(None, "all values are equal", distinct)
    if is_text(kind):
        return _of_text(column, there.size, distinct, guess)
    if pa.types.is_boolean(kind):
        return guess("categorical", "yes or no", distinct)
    if pa.types.is_integer(kind) and (name.lower().endswith("id") or (distinct <= _FEW and distinct * 5 <= there.size)):
        return guess("categorical", f"{distinct} different integers", distinct)
    return guess(_of_numbers(numbers_of(column, name)), "numbers", distinct)


_Guesser: TypeAlias = Callable[[Any, str, int], Guess]


def _of_numbers(numbers: Any) -> dict[str, Any]:
    numbers = np.abs(numbers[~np.isnan(numbers)])
    skewed = numbers.size and numbers.max() > 100 * max(float(np.median(numbers)), 1e-12)
    return {"kind": "numeric", "transform": "log"} if skewed else {"kind": "numeric"}


def _of_lists(name: str, column: Any, guess: _Guesser) -> Guess:
    found = lists_of(column, " ", name)
    there = found.length[~found.missing]
    if pa.types.is_floating(column.type.value_type):
        if np.unique(there).size == 1:
            return guess({"kind": "vector", "size": int(there[0])}, "lists of numbers, of one length", 0)
        return guess(None, "lists of numbers of different lengths", 0)
    keys, absent, _ = keys_of(found.values)
    distinct = int(np.unique(keys[~absent]).size)
    if 2 * distinct > keys.size:
        return guess(None, "nearly all elements differ", distinct)
    size = int(np.quantile(there, 0.99)) if there.size else 1
    return guess({"kind": "bag", "size": max(size, 1)}, "lists", distinct)


def _of_text(column: Any, number: int, distinct: int, guess: _Guesser) -> Guess:
    for separator in ("|", ";"):
        if pc.sum(pc.match_substring(column, separator)).as_py() > 0.2 * number:
            found = lists_of(column, separator, "")
            elements = int(np.unique(keys_of(found.values)[0]).size)
            if 2 * elements <= len(found.values):
                size = int(np.quantile(found.length[~found.missing], 0.99))
                return guess({"kind": "bag", "separator": separator, "size": max(size, 1)}, "text with parts", elements)
    if 2 * distinct > number and number > 20:
        return guess(None, "nearly all values differ", distinct)
    return guess("categorical", f"{distinct} different texts", distinct)


def _named_like_time(name: str) -> bool:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return plain in ROLES["time"] or plain.endswith(("time", "timestamp", "date"))


def _looks_like_time(column: Any) -> bool:
    if is_text(column.type):
        try:
            column.slice(0, 100).cast(pa.timestamp("us"))
        except pa.ArrowInvalid:
            return False
        return True
    largest, unit = pc.max(column).as_py(), guess_unit(column)
    return isinstance(largest, (int, float)) and (unit in DIGITS or (largest > 1e8 and unit != "ns"))
