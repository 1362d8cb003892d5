"""The format of delimited text files: delimiter, column names and types, from the first lines."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads

_NULLS: Final = ("", "NULL", "null", "NaN", "nan", "None")
_LOOKED_AT: Final = 1000
_BLOCK: Final = 1 << 22
"""Bytes of a file that are parsed at once. Up to 32 of them wait to be taken."""
_PADDED = re.compile(r"0\d+")
_TYPED = re.compile(r"([^:]+):(token|float|token_seq|float_seq)")
_WITHOUT_HEADER: Final = {
    r"\d+\t[^\t]+\t[^\t]+\t[^\t]*\t\S+-[01]( \S+-[01])*": (
        "impression_id", "user_id", "time", "history", "impressions",
    ),
    r"N\d+(\t[^\t]*){5}(\t\[[^\t]*\]|\t){2}": (
        "news_id", "category", "subcategory", "title", "abstract", "url", "title_entities", "abstract_entities",
    ),
}  # fmt: skip
"""First lines of published files without a header, and their columns: MIND's behaviors.tsv and news.tsv."""
_TIME: Final = "%m/%d/%Y %I:%M:%S %p"
"""How MIND writes times; others are ISO 8601."""


def text_format(files: Any, places: Sequence[str], types: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    """Return the Arrow format of delimited text files, and their columns that contain sequences.

    Args:
        files: The file system.
        places: The files; they must have the same header.
        types: Arrow types of columns, to replace wrong guesses.
    """
    (header, *first), *others = (_first_lines(files, place, 1 if n else _LOOKED_AT) for n, place in enumerate(places))
    if not header:
        raise ValueError(f"{places[0]} has no header line")
    known = next((names for first, names in _WITHOUT_HEADER.items() if re.fullmatch(first, header)), ())
    for place, other in zip(places[1:], others, strict=True):
        if not known and other[0].replace('"', "") != header.replace('"', ""):
            raise ValueError(
                f"{place} begins with {other[0]!r:.60} and {places[0]} with {header!r:.60}; files of one table must "
                f"have the same header"
            )
    delimiter = max(("\t", ",", ";", "|"), key=header.count)
    names = list(known) or [name.strip().strip('"') for name in header.split(delimiter)]
    if all(re.fullmatch(r"[-+.\deE]+", name) for name in names):
        raise ValueError(
            f"{places[0]} begins with {header!r:.60} instead of the names of its columns; add a header line"
        )
    typed = [_TYPED.fullmatch(name) for name in names]
    column_types: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    if all(typed):
        names = [match[1] for match in typed if match]
        kinds = [match[2] for match in typed if match]
        column_types = {
            name: pa.float64() if kind == "float" else pa.string() for name, kind in zip(names, kinds, strict=True)
        }
        sequences = {"token_seq": pa.string(), "float_seq": pa.float64()}
        lists = {name: sequences[kind] for name, kind in zip(names, kinds, strict=True) if kind in sequences}
    else:  # numbers with leading zeros are read as text: 007 is not 7
        rows = [row for line in first if len(row := line.replace('"', "").split(delimiter)) == len(names)]
        columns = zip(names, zip(*rows, strict=True), strict=False)
        column_types = {name: pa.string() for name, column in columns if any(map(_PADDED.fullmatch, column))}
    for name, kind in types.items():
        if name in names and name not in lists:
            column_types[name] = pa.type_for_alias(kind)
    quote = False if all(typed) or known else '"'
    made = pads.CsvFileFormat(
        parse_options=pacsv.ParseOptions(delimiter=delimiter, quote_char=quote, newlines_in_values=False),
        convert_options=pacsv.ConvertOptions(
            column_types=column_types,
            null_values=list(_NULLS),
            strings_can_be_null=True,
            timestamp_parsers=[pacsv.ISO8601, _TIME] if known else [],
        ),
        read_options=pacsv.ReadOptions(column_names=names, skip_rows=0 if known else 1, block_size=_BLOCK),
    )
    return made, lists


def text_batches(file: Any, schema: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the record batches of a delimited text file, which is read as they are taken.

    The scan of a data set reads ahead by a gigabyte if its batches are taken more slowly than they are read.

    Args:
        file: A fragment of a data set in the format of `text_format`.
        schema: The types of its columns.
        columns: The columns to read.
    """
    options = file.format.default_fragment_scan_options
    convert = copy.copy(options.convert_options)
    convert.column_types, convert.include_columns = schema, list(columns)
    with (
        file.filesystem.open_input_stream(file.path, compression="detect") as stream,
        pacsv.open_csv(stream, options.read_options, file.format.parse_options, convert) as reader,
    ):
        yield from reader


def _first_lines(files: Any, place: str, number: int) -> list[str]:
    with files.open(place, mode="rt", compression="infer", encoding="utf-8-sig", newline="") as file:
        return [file.readline().rstrip("\r\n")] + [line.rstrip("\r\n") for line in islice(file, number - 1)]
