"""The options of vocabularies, and how users write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["auto", "dense", "compact", "hash", "growing"]
VocabularyChoice = str | dict[str, str | dict[str, int | str]]
"""The type of the argument `vocabulary`: one string for all tables, or a mapping from table to string or options."""

AUTO_DENSE_ROWS: Final = 2_000_000
"""Maximum number of rows for which ``auto`` is dense. With 16 columns and Adam the table needs 512 MB per stage."""

_TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": ("min_count", "oov_rows"),
    "dense": (),
    "compact": ("min_count", "oov_rows"),
    "hash": ("rows", "seed"),
    "growing": ("min_count", "evict_after"),
}


@dataclass(frozen=True)
class VocabularyOptions:
    """The options of the vocabulary of a table.

    Attributes:
        kind: ``"dense"``, ``"compact"``, ``"hash"``, ``"growing"`` (new ids get rows from part to part of a stream), or
            ``"auto"``: dense up to `AUTO_DENSE_ROWS` rows, compact above.
        min_count: For ``compact`` and ``growing``: ids that occur less often in training are treated as unknown.
        oov_rows: For ``compact``: number of rows for unknown ids.
        rows: For ``hash``: number of rows of the table.
        seed: For ``hash``: seed of the hash.
        evict_after: For ``growing``: ids that were not seen in so many parts lose their row; 0 = never.
    """

    kind: Kind = "auto"
    min_count: int = 1
    oov_rows: int = 1
    rows: int | None = None
    seed: int = 0
    evict_after: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _TAKES:
            raise ValueError(f"a vocabulary is one of {', '.join(_TAKES)}, got {self.kind!r}")
        if self.min_count < 1 or self.oov_rows < 1:
            raise ValueError(f"min_count and oov_rows must be at least 1, got {self.min_count} and {self.oov_rows}")
        if self.evict_after < 0:
            raise ValueError(f"evict_after must not be negative (0 = never), got {self.evict_after}")
        if self.kind == "hash" and (self.rows is None or self.rows < 2):
            raise ValueError(f"a hash vocabulary needs its number of rows, e.g. hash:rows=1000000; got {self.rows}")

    @classmethod
    def parse(cls, given: str | Mapping[str, Any] | None) -> VocabularyOptions:
        """Parse the options: ``KIND``, ``KIND:option=number,...``, a mapping with the key ``kind``, or None (``auto``).

        Example:
            >>> VocabularyOptions.parse("compact:min_count=5,oov_rows=100").oov_rows
            100
            >>> VocabularyOptions.parse({"kind": "hash", "rows": 1000}).rows
            1000
        """
        if given is None:
            return cls()
        if isinstance(given, Mapping):
            options = {**given}
            kind = str(options.pop("kind", "auto"))
        else:
            kind, _, rest = given.strip().partition(":")
            options = dict(part.strip().partition("=")[::2] for part in rest.split(",") if part.strip())
        if kind not in _TAKES:
            raise ValueError(
                f"a vocabulary is one of {', '.join(_TAKES)}, or a mapping from table to one of them; got {given!r}"
            )
        for name, value in options.items():
            if name not in _TAKES[kind]:
                takes = ", ".join(_TAKES[kind]) or "no options"
                raise ValueError(f"vocabulary {given!r}: {kind} takes {takes}, got {name!r}")
            try:
                options[name] = int(value)
            except (TypeError, ValueError):
                raise ValueError(f"vocabulary {given!r}: {name} must be an integer, got {value!r}") from None
        return cls(kind, **options)  # type: ignore[arg-type]


def vocabulary_options(choice: VocabularyChoice | None, tables: Iterable[str]) -> dict[str, VocabularyOptions]:
    """Return the options of each table.

    Args:
        choice: One string for all tables (``"compact"``, ``"hash:rows=1000000"``), or a mapping from table to a string
            or to options. The key ``"default"`` is used for all other tables; None = ``auto`` for all.
        tables: The names of the tables.

    Example:
        >>> found = vocabulary_options({"video_id": "hash:rows=100", "default": "dense"}, ["video_id", "user_id"])
        >>> found["video_id"].rows, found["user_id"].kind
        (100, 'dense')
    """
    tables = list(tables)
    if not isinstance(choice, Mapping):
        return dict.fromkeys(tables, VocabularyOptions.parse(choice))
    unknown = [name for name in choice if name not in tables and name != "default"]
    if unknown:
        raise ValueError(f"vocabulary names table {unknown[0]!r}; there are {', '.join(tables)} (and 'default')")
    return {name: VocabularyOptions.parse(choice.get(name, choice.get("default"))) for name in tables}
