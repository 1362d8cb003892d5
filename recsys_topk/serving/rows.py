"""Requests from files: one row per user, with features and a history. Needs pyarrow and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet, CSV, TSV or JSON lines file, for `CascadeRecommender.recommend`.

    In CSV and TSV files a history is a string of item names separated by spaces, and column types are inferred.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the file {str(path)!r} does not exist")
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson", ".json"):
        return _json_lines(path)
    import pyarrow as pa

    try:
        if kind == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path)
        elif kind in (".csv", ".tsv"):
            import pyarrow.csv

            parse = pyarrow.csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",")
            types = {"history": pa.string()}
            convert = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True)
            table = pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)
        else:
            raise ValueError(f"{str(path)!r} must end in .parquet, .csv, .tsv or .jsonl")
    except pa.ArrowInvalid as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        if isinstance(row.get("history"), str):
            row["history"] = row["history"].split()
    return rows


def read_titles(path: str | Path) -> dict[str, str]:
    """Return the titles of items by their names, from a file with a column ``item_id`` and a column ``title``."""
    rows = read_rows(path)
    have = dict.fromkeys(name for row in rows for name in row)
    item = next((name for name in ("item_id", "item", "itemId", "id") if name in have), None)
    title = next((name for name in ("title", "name") if name in have), None)
    if item is None or title is None:
        raise ValueError(f"{str(path)!r} must have columns item_id and title, it has: {', '.join(have)}")
    return {str(row[item]): str(row[title]) for row in rows if row.get(title) is not None}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: must be an object with features and a history")
        rows.append(row)
    return rows
