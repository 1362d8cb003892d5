"""Requests from files: one row per user, with features and a history. Needs pyarrow and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recsys_topk.tabular.tables.reader import open_table


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet, CSV, TSV or JSON lines file, for `CascadeRecommender.recommend`.

    In CSV and TSV files a history is a string of item names separated by spaces, and column types are inferred.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the file of users {str(path)!r} does not exist")
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):  # rows may have different keys
        return _json_lines(path)
    if path.suffix.lower() not in (".parquet", ".csv", ".tsv"):
        raise ValueError(f"{str(path)!r} must end in .parquet, .csv, .tsv or .jsonl")
    reader = open_table(path)
    if path.suffix.lower() != ".parquet" and "history" in reader.columns:
        reader = open_table(path, {"history": "string"})
    rows: list[dict[str, Any]] = [row for batch in reader.batches() for row in batch.to_pylist()]
    for row in rows:
        if isinstance(row.get("history"), str):
            row["history"] = row["history"].split()
    return rows


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
