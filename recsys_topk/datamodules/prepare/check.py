"""Check a folder of prepared data against the format that docs/prepared-format.md describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from recsys_topk.datamodules.prepare.columns import find_table, read_table
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.types import Array

SPLITS: Final = ("train", "val", "test")
_REQUESTS: Final = dict.fromkeys(("request_id", "user", "start", "stop", "seen", "tied", "ends"), "i")
_LISTS: Final = dict.fromkeys(("request_id", "start", "length", "time"), "i")
TABLES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "interactions": {
        "users": {"key": "i", "start": "i", "stop": "i"},
        "items": {"item_id": "i", "count": "i"},
        "events": {"item": "i"},
        **dict.fromkeys(SPLITS, _REQUESTS),
        **{f"{split}-positives": {"item": "i", "weight": "f"} for split in SPLITS},
    },
    "lists": {
        **dict.fromkeys(SPLITS, _LISTS),
        **{f"{split}-rows": {"item": "i", "label": "f", "group": "i"} for split in SPLITS},
        **{f"{split}-items": {"item_id": "i", "count": "i"} for split in SPLITS},
    },
}
"""The required columns of each table, and their kind: integers or floats."""

_FACTS: Final = {"interactions": ("interactions", "users", "items", "requests", "times", "left_out"),
                 "lists": ("rows", "requests", "items", "counts")}  # fmt: skip


def check_prepared(folder: Path, kind: str | None = None) -> dict[str, int]:
    """Check a folder of prepared data; return the number of rows of each table.

    Args:
        folder: The folder.
        kind: ``"interactions"`` or ``"lists"``; None = interactions if there is a table of events.

    Raises:
        ValueError: A file, a column or a value is not as the format requires. The message names it.
    """
    kind = kind or ("lists" if find_table(folder, "events") is None else "interactions")
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        encoder = FeatureEncoder.load(folder / "features")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not prepared: {error}") from error
    for name in _FACTS[kind]:
        if name not in facts:
            raise ValueError(f"{folder / 'facts.json'} has no {name!r}; it needs {', '.join(_FACTS[kind])}")
    tables = {}
    for table, columns in TABLES[kind].items():
        place = find_table(folder, table)
        if place is None:
            raise ValueError(f"{folder} has no table {table!r}: {table}.arrow, {table}.parquet or a folder of parts")
        tables[table] = read_table(place)
        for column, letter in columns.items():
            if column not in tables[table]:
                raise ValueError(f"{place} has no column {column!r}; it needs {', '.join(columns)}")
            if tables[table][column].dtype.kind != letter:
                expected = "integers" if letter == "i" else "floats"
                raise ValueError(
                    f"column {column!r} of {place} must have {expected}, got {tables[table][column].dtype}"
                )
    widths = {part: _widths(encoder, part) for part in ("user", "context", "items")}
    if kind == "interactions":
        _check_interactions(folder, tables)
        parts = {"users": widths["user"], "items": widths["items"], **dict.fromkeys(SPLITS, widths["context"])}
    else:
        _check_lists(folder, tables)
        user, context = widths["user"], widths["context"]
        request = user[0] + context[0], user[1] + context[1]
        parts = {**dict.fromkeys(SPLITS, request), **{f"{split}-items": widths["items"] for split in SPLITS}}
    for table, both in parts.items():
        for column, width in zip(("ids", "values"), both, strict=True):
            found = tables[table][column].shape[1] if column in tables[table] else 0
            if found != width:
                raise ValueError(
                    f"column {column!r} of {folder / table} must have {width} per row, as features/ describes, got "
                    f"{found}"
                )
    return {name: len(next(iter(columns.values()))) for name, columns in tables.items()}


def _widths(encoder: FeatureEncoder, part: str) -> tuple[int, int]:
    """Return the number of ids and of values that the features of a part have."""
    made = encoder.encode(part, [], partial=True)  # type: ignore[arg-type]
    return made.ids.shape[1], made.values.shape[1]


def _check_interactions(folder: Path, tables: Mapping[str, Mapping[str, Array]]) -> None:
    users, items, events = (len(tables[name][key]) for name, key in
                            (("users", "key"), ("items", "item_id"), ("events", "item")))  # fmt: skip
    _ascending(tables["users"]["key"], folder / "users", "key")
    _ascending(tables["items"]["item_id"], folder / "items", "item_id")
    _within(tables["events"]["item"], items, folder / "events", "item")
    for split in SPLITS:
        requests, positives = tables[split], tables[f"{split}-positives"]
        place = folder / split
        _within(requests["user"], users, place, "user")
        _within(positives["item"], items, folder / f"{split}-positives", "item")
        start, stop, seen, tied = (requests[name] for name in ("start", "stop", "seen", "tied"))
        if ((start < 0) | (stop < start) | (tied < stop) | (tied > events)).any():
            raise ValueError(f"{place} must have 0 <= start <= stop <= tied <= {events}, the number of events")
        if ((seen < start) | (seen > events)).any():
            raise ValueError(f"{place} must have start <= seen <= {events}, the number of events")
        ends = np.r_[0, requests["ends"]]
        if (ends[1:] <= ends[:-1]).any() or ends[-1] != len(positives["item"]):
            raise ValueError(
                f"column 'ends' of {place} must ascend to {len(positives['item'])}, the number of positives"
            )


def _check_lists(folder: Path, tables: Mapping[str, Mapping[str, Array]]) -> None:
    for split in SPLITS:
        requests, rows, items = tables[split], tables[f"{split}-rows"], tables[f"{split}-items"]
        _ascending(items["item_id"], folder / f"{split}-items", "item_id")
        _within(rows["item"], len(items["item_id"]), folder / f"{split}-rows", "item")
        ends = requests["start"] + requests["length"]
        if (requests["length"] < 1).any() or (requests["start"] < 0).any() or (ends > len(rows["item"])).any():
            raise ValueError(
                f"{folder / split} must have start >= 0, length >= 1 and start + length <= {len(rows['item'])}"
            )


def _ascending(column: Array, place: Path, name: str) -> None:
    if (column[1:] <= column[:-1]).any():
        raise ValueError(f"column {name!r} of {place} must ascend, without repeated values")


def _within(column: Array, number: int, place: Path, name: str) -> None:
    wrong = np.flatnonzero((column < 0) | (column >= number))
    if wrong.size:
        raise ValueError(
            f"row {wrong[0] + 1} of {place}: {name} is {column[wrong[0]]}, and there are rows 0 to {number - 1}"
        )
