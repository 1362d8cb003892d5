"""The names in a request that an export does not know. They have no effect, so the caller should hear of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from recsys_topk.registry import suggest
from recsys_topk.tabular.export_tables import Names
from recsys_topk.text import printable

_SHOWN = 5


def about_unknown(what: str, given: Sequence[Any], known: Names, effect: str = "have no effect") -> list[str]:
    """Return a sentence about the given names that are not known, or nothing if all are.

    Example:
        >>> import numpy as np
        >>> about_unknown("blocked items", ["b", "x", "a"], Names(np.array(["a", "b"])))
        ["1 of 3 blocked items are not in the export and have no effect: 'x'"]
    """
    missing = [given[place] for place in (known.rows(given) < 0).nonzero()[0].tolist()] if len(given) else []
    if not missing:
        return []
    return [f"{len(missing):,} of {len(given):,} {what} are not in the export and {effect}: {_listed(missing)}"]


def about_columns(given: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return a sentence about the names of features that are not known, or nothing if all are.

    Example:
        >>> about_columns(["agee"], ["age", "city"])
        ["features that the export does not have, and that have no effect: 'agee' (did you mean 'age'?)"]
    """
    missing = [name for name in given if name not in known]
    return [f"features that the export does not have, and that have no effect: {_listed(missing, known)}"] * bool(
        missing
    )


def _listed(names: Iterable[Any], known: Sequence[str] = ()) -> str:
    distinct = list(dict.fromkeys(str(name)[:99] for name in names))
    shown = [f"{name!r} ({suggest(name, known).strip()})".removesuffix(" ()") for name in distinct[:_SHOWN]]
    more = [f"and {len(distinct) - _SHOWN:,} more"] * (len(distinct) > _SHOWN)
    return printable(", ".join([*shown, *more]))
