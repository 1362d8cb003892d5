"""SVMlight and LETOR files: ``LABEL qid:QUERY INDEX:VALUE ...`` per line, or list lengths in a separate file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.tabular.tables.reader import TableReader, list_files
from recsys_topk.types import Array

ROLES: Final = {"request": "query", "label": "label"}
DESCRIPTION: Final = {"items": {"features": "vector"}}
LARGEST_INDEX: Final = 100_000
"""Largest allowed feature index. Rows become dense vectors, so a larger index is probably an error in the file."""

_LINE = re.compile(rb"\s*[-+.\deE]+(\s+qid:\S+)?(\s+\d+:\S+)+\s*(#.*)?", re.DOTALL)
_LINES: Final = 1 << 14


def looks_like_svmlight(path: str | Path) -> bool:
    """Return whether the first line that is not a comment has SVMlight format."""
    try:
        files, places = list_files(path)
        if len(places) != 1:
            return False
        with files.open(places[0], "rb", compression="infer") as file:
            lines = (
                line for line in itertools.islice(file, 100) if line.strip() and not line.lstrip().startswith(b"#")
            )
            return bool(_LINE.fullmatch(next(lines, b"")[:100_000]))
    except (OSError, ValueError):
        return False


def largest_index(path: str | Path) -> int:
    """Return the largest feature index of a file. Reads the whole file."""
    return max((int(index.max(initial=0)) for _, _, _, index, _ in _parsed(path)), default=0)


def open_svmlight(path: str | Path, width: Callable[[], int]) -> TableReader:
    """Open a file as a table with the columns ``query``, ``label`` and ``features``, a dense vector.

    Features missing in a line are 0. Without ``qid:`` in the lines, the file ``<path>.query`` has the lengths of the
    lists, in order. Line numbers in error messages count from 1.

    Args:
        path: The file; it may be compressed.
        width: Returns the largest feature index of all related files; called when rows are read.
    """
    files, (place,) = list_files(path)
    beside = f"{path}.query"
    with files.open(place, "rb", compression="infer") as file:
        named = any(b"qid:" in line for line in itertools.islice(file, 100))
    lengths = None if named else _read_lengths(beside, path)
    schema = pa.schema([
        ("query", pa.int64()), ("label", pa.float64()), ("features", pa.list_(pa.float32())),
    ])  # fmt: skip

    def scan(columns: Sequence[str]) -> Iterator[Any]:
        queries = None if lengths is None else np.repeat(np.arange(lengths.size), lengths)
        done, columns_wide = 0, width()
        for labels, query, row, index, value in _parsed(path):
            if queries is not None:
                query = queries[done : done + labels.size]
                if query.size < labels.size:
                    raise ValueError(
                        f"{beside} has list lengths for {queries.size} rows, and {path} has more rows; make them equal"
                    )
            elif (query < 0).any():
                at = done + int(np.flatnonzero(query < 0)[0]) + 1
                raise ValueError(f"{path}, row {at}: it has no qid:, and other rows have one; add it")
            dense = np.zeros((labels.size, columns_wide), dtype=np.float32)
            dense[row, index - 1] = value
            done += labels.size
            arrays = {
                "query": pa.array(query),
                "label": pa.array(labels),
                "features": pa.FixedSizeListArray.from_arrays(pa.array(dense.reshape(-1)), columns_wide),
            }
            yield pa.record_batch([arrays[name] for name in columns], names=list(columns))
        if queries is not None and done < queries.size:
            raise ValueError(
                f"{beside} has list lengths for {queries.size} rows, and {path} has {done}; make them equal"
            )

    def identity() -> Any:
        facts = [files.info(place)] + ([] if lengths is None else [{"lengths": lengths.tolist()}])
        return [str(path), *({k: str(fact[k]) for k in ("size", "mtime", "lengths") if k in fact} for fact in facts)]

    return TableReader(str(path), schema, scan, identity, nbytes=int(files.size(place)))


def _read_lengths(path: str, rows: str | Path) -> Array:
    if not Path(path).is_file():
        raise ValueError(f"{rows} has no qid: and there is no {path} with the lengths of its lists; give one of them")
    text = Path(path).read_text(encoding="utf-8", errors="replace").split()
    if not text or not all(word.isdecimal() for word in text):
        wrong = next((word for word in text if not word.isdecimal()), "nothing")
        raise ValueError(f"{path} must have the length of each list, one integer per line; got {wrong!r:.40}")
    return np.array(text, dtype=np.int64)


def _parsed(path: str | Path) -> Iterator[tuple[Array, Array, Array, Array, Array]]:
    """Yield labels, queries (-1 = none) and the row, index and value of all features, in chunks of lines."""
    files, (place,) = list_files(path)
    number = 0
    with files.open(place, "rb", compression="infer") as file:
        while lines := list(itertools.islice(file, _LINES)):
            text = [line.partition(b"#")[0].strip() for line in lines]
            kept = [(number + at + 1, line) for at, line in enumerate(text) if line]
            number += len(lines)
            if kept:
                yield _parse(path, kept)


def _parse(path: str | Path, lines: Sequence[tuple[int, bytes]]) -> tuple[Array, Array, Array, Array, Array]:
    """Parse numbered lines. Compiled code splits and converts the tokens."""
    try:
        return _parse_lines([line for _, line in lines])
    except (ValueError, OverflowError) as error:
        for number, line in lines:
            try:
                _parse_lines([line])
            except (ValueError, OverflowError) as own:
                shown = line.decode("utf-8", "replace")
                raise ValueError(
                    f"{path}, line {number}: {own}; a line is LABEL qid:QUERY INDEX:VALUE ..., got {shown!r:.80}"
                ) from error
        raise


def _parse_lines(lines: Iterable[bytes]) -> tuple[Array, Array, Array, Array, Array]:
    queries, counts, rest = [], [], []
    for line in lines:
        query = -1
        if b"qid:" in line:
            head, _, tail = line.partition(b"qid:")
            name, _, tail = tail.partition(b" ")
            if not name.isdigit():
                raise ValueError(f"qid:{name.decode('utf-8', 'replace')} is not an integer")
            query, line = int(name), head + tail
        queries.append(query)
        counts.append(line.count(b":"))
        rest.append(line.replace(b":", b" "))
    words = b" ".join(rest).split()
    count = np.array(counts)
    lengths = 1 + 2 * count
    if len(words) != lengths.sum():
        raise ValueError("a number without an index, or an index without a number")
    try:
        numbers = np.array(words).astype(np.float64)
    except ValueError:
        raise ValueError("a value that is not a number") from None
    if not np.isfinite(numbers).all():
        raise ValueError("NaN or infinity")
    starts = np.cumsum(lengths) - lengths
    labels = numbers[starts]
    row = np.repeat(np.arange(count.size), count)
    place = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
    at = starts[row] + 1 + 2 * place
    index = numbers[at].astype(np.int64)
    if index.size and (index.min() < 1 or index.max() > LARGEST_INDEX or (index != numbers[at]).any()):
        raise ValueError(f"feature indices must be integers from 1 to {LARGEST_INDEX}")
    key = row * (LARGEST_INDEX + 1) + index
    if np.unique(key).size < key.size:
        raise ValueError("a feature index occurs twice")
    return labels, np.array(queries), row, index, numbers[at + 1].astype(np.float32)
