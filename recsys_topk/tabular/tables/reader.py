"""Read tables (files, folders, URLs, data frames) as Arrow record batches, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from recsys_topk.registry import suggest
from recsys_topk.tabular.tables.text import text_batches, text_format

Source: TypeAlias = Any
"""A path or URL, several of them, a folder, a pandas or polars frame, a pyarrow table or a `datasets.Dataset`."""

FORMATS: Final = {
    "parquet": "parquet", "pq": "parquet", "csv": "csv", "tsv": "csv", "tab": "csv", "txt": "csv",
    "inter": "csv", "user": "csv", "item": "csv", "jsonl": "json", "ndjson": "json", "json": "json",
    "feather": "feather",
}  # fmt: skip
"""Format by the suffix of the file name. `.gz`, `.bz2` or `.zst` may follow the suffix."""

BATCH_ROWS: Final = 1 << 16
PIECE_ROWS: Final = 1 << 20
"""Number of rows of a piece of a Parquet file, about; at least a row group."""
_COMPRESSED: Final = ("gz", "bz2", "zst")
_ENCODING: Final = "save it as UTF-8, e.g. iconv -f LATIN1 -t UTF-8"


def open_table(source: Source, types: Mapping[str, str] | None = None) -> TableReader:
    """Open a table. Only its first rows are read.

    Files are Parquet, CSV or TSV (the delimiter is detected in the header), JSON lines, Feather, or RecBole's atomic
    files, whose headers contain types (``user_id:token``, ``class:token_seq``). Several files, or a folder of files,
    form one table if they have the same format and columns.

    Args:
        source: A path or URL (fsspec), a list of them, a folder, a pandas or polars data frame, a pyarrow table or a
            Hugging Face `datasets.Dataset`.
        types: Arrow types of columns of text files, to replace wrong guesses, e.g. ``{"user_id": "string"}``.

    Raises:
        ValueError: The source cannot be read, has no rows, or has an unknown format. The message explains what to do.

    Example:
        >>> import pyarrow as pa
        >>> reader = open_table(pa.table({"user": [1, 2], "item": ["a", "b"]}))
        >>> reader.columns, [batch.num_rows for batch in reader.batches()]
        (['user', 'item'], [2])
    """
    if isinstance(source, (str, Path)):
        return _open_files([source], types or {})
    if isinstance(source, (list, tuple)):
        if not source:
            raise ValueError("an empty list of files was given; give at least one file")
        return _open_files(source, types or {})
    return _open_frame(source)


class TableReader:
    """A table that can be read several times, one batch of rows at a time.

    Args:
        name: Name of the table in messages.
        schema: The columns and their types.
        scan: A function that yields record batches of the given columns.
        identity: A function that returns plain values that change when the content changes.
        rows: Number of rows; None = not known without reading them.
        nbytes: Size of the files in bytes; None = not known.
        lists: Columns of text that are split at spaces, and the type of their elements (sequences of RecBole).
        pieces: Returns the table as `pieces`; None = it is one piece.

    Attributes:
        first: Number of rows of the table before this piece of it.
        opens: Number of rows of the table before the file of this piece.
    """

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        scan: Callable[..., Iterable[pa.RecordBatch]],
        identity: Callable[[], Any],
        rows: int | None = None,
        lists: Mapping[str, pa.DataType] | None = None,
        nbytes: int | None = None,
        pieces: Callable[[], Iterable[TableReader]] | None = None,
    ) -> None:
        self.name, self.rows, self.first, self.opens = name, rows, 0, 0
        self._pieces = pieces
        self.nbytes = nbytes
        self._scan, self._identity, self._lists = scan, identity, dict(lists or {})
        self.schema = pa.schema([
            pa.field(field.name, pa.list_(self._lists[field.name])) if field.name in self._lists else field
            for field in schema
        ])  # fmt: skip
        repeated = sorted({column for column in self.columns if self.columns.count(column) > 1})
        if repeated:
            raise ValueError(f"{name} has the column {repeated[0]!r} twice; rename one of them")

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema.names)

    def require(self, columns: Iterable[str]) -> None:
        """Raise a ValueError if a column is missing. The message suggests the most similar column."""
        for column in columns:
            if column not in self.columns:
                close = suggest(column, self.columns)
                raise ValueError(f"{self.name} has no column {column!r}; {close}it has: {', '.join(self.columns)}")

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order as record batches. Memory: that of a few batches.

        Dictionary-encoded columns are decoded.

        Args:
            columns: The columns; None = all.
        """
        wanted = self.columns if columns is None else list(dict.fromkeys(columns))
        self.require(wanted)
        with _readable(self.name):
            for batch in self._scan(wanted):
                if batch.num_rows:
                    yield pa.record_batch([self._plain(batch.column(name), name) for name in wanted], names=wanted)

    def head(self, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the first rows."""
        found: list[Any] = []
        for batch in self.batches(columns):
            found.append(batch.slice(0, rows))
            rows -= batch.num_rows
            if rows <= 0:
                break
        if not found:
            return pa.schema([field for field in self.schema if columns is None or field.name in columns]).empty_table()
        return pa.Table.from_batches(found)

    def pieces(self) -> list[TableReader]:
        """Return consecutive parts of the table that can be read on their own: row groups of Parquet files."""
        return [self] if self._pieces is None else list(self._pieces())

    def changed(self, schema: pa.Schema, scan: Callable[[TableReader, list[str]], Iterable[pa.RecordBatch]],
                identity: Callable[[], Any] | None = None, rows: int | None = None) -> TableReader:  # fmt: skip
        """Return a table that is made from this one. `scan` takes this table, or a piece of it, and the columns."""

        def pieces() -> Iterator[TableReader]:
            for piece in self.pieces():
                made = TableReader(self.name, schema, partial(scan, piece), list)
                made.first = piece.first
                yield made

        return TableReader(
            self.name, schema, partial(scan, self), identity or self._identity, rows, nbytes=self.nbytes, pieces=pieces
        )

    def fingerprint(self) -> str:
        """Return a hash of the sizes and times of the files, or of the values of a data frame."""
        return hashlib.blake2b(json.dumps(self._identity()).encode(), digest_size=8).hexdigest()

    def _plain(self, column: Any, name: str) -> Any:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if name in self._lists:
            column = pc.split_pattern(pc.utf8_trim_whitespace(column), " ").cast(pa.list_(self._lists[name]))
        return column


def file_format(path: str) -> str | None:
    """Return the format of a file, given its name; None if the format is unknown.

    Example:
        >>> file_format("clicks.csv.gz"), file_format("model.ckpt")
        ('csv', None)
    """
    endings = PurePosixPath(path.replace("\\", "/")).name.lower().split(".")[1:]
    if endings and endings[-1] in _COMPRESSED:
        endings.pop()
    return FORMATS.get(endings[-1]) if endings else None


def list_files(path: str | Path) -> tuple[Any, list[str]]:
    """Return the file system of a path or URL, and the sorted files of known formats there.

    Raises:
        ValueError: The path does not exist.
    """
    import fsspec

    files, place = fsspec.core.url_to_fs(str(path) if "://" in str(path) else str(Path(path).expanduser()))
    if files.isfile(place):
        return files, [place]
    if not files.isdir(place):
        raise ValueError(f"there is no file or folder {str(path)!r}")
    inside = [found for found in sorted(files.find(place)) if "/." not in found[len(place) :]]
    return files, [found for found in inside if file_format(found) is not None]


def file_names(path: str | Path) -> list[str]:
    """Return the sorted files of known formats at a path or URL (`list_files`), as paths or URLs."""
    files, places = list_files(path)
    return [files.unstrip_protocol(place) for place in places] if "://" in str(path) else places


def _open_files(paths: Sequence[str | Path], types: Mapping[str, str]) -> TableReader:
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    found = [list_files(path) for path in paths]
    files, places = found[0][0], [place for _, inside in found for place in inside]
    if not places:
        raise ValueError(f"{name} has no file that ends in .{', .'.join(FORMATS)}")
    formats = {file_format(place): place for place in places}
    if None in formats:
        raise ValueError(f"{formats[None]} has an unknown ending; known: .{', .'.join(FORMATS)}")
    if len(formats) > 1:
        raise ValueError(
            f"{name} has files of several formats: {' and '.join(formats.values())}; name the files of one format"
        )
    (kind,) = formats
    local = "file" in files.protocol if isinstance(files.protocol, tuple) else files.protocol == "file"
    lists: dict[str, Any] = {}
    with _readable(name):
        chosen: Any = kind
        if kind == "csv":
            chosen, lists = text_format(files, places, types)
        elif kind == "parquet":
            chosen = pads.ParquetFileFormat(
                default_fragment_scan_options=pads.ParquetFragmentScanOptions(pre_buffer=False)
            )
        dataset = pads.dataset(places, format=chosen, filesystem=None if local else files)
        rows = dataset.count_rows() if kind in ("parquet", "feather") else None
        fragments = [*dataset.get_fragments()]
        first = (batch.num_rows for batch in _scan(fragments, dataset.schema, dataset.schema.names[:1]))
        if not (any(first) if rows is None else rows):
            raise ValueError(f"{name} has no rows")
        for field in dataset.schema if kind == "csv" else ():
            if pa.types.is_binary(field.type):
                raise ValueError(f"{name} cannot be read: column {field.name!r} is not UTF-8; {_ENCODING}")

    def identity() -> Any:
        facts = [files.info(place) for place in places]
        changed = ("mtime", "LastModified", "updated", "ETag", "created")
        when = [next((str(fact[key]) for key in changed if key in fact), "") for fact in facts]
        sizes = [fact.get("size") for fact in facts]
        return [list(row) for row in zip(places, sizes, when, strict=True)]

    nbytes = sum(int(files.size(place)) for place in places)

    def pieces() -> Iterator[TableReader]:
        first = 0
        for file in fragments:
            sizes = np.array([group.num_rows for group in file.row_groups], dtype=np.int64)
            starts = np.cumsum(sizes) - sizes
            for own in np.split(np.arange(sizes.size), np.flatnonzero(np.diff(starts // PIECE_ROWS)) + 1):
                if sizes[own].sum():
                    part = file.subset(row_group_ids=own.tolist())
                    piece = TableReader(file.path, dataset.schema, partial(_scan, [part], dataset.schema), list)
                    piece.opens, piece.first = first, first + int(starts[own[0]])
                    yield piece
            first += int(sizes.sum())

    return TableReader(
        name, dataset.schema, partial(_scan, fragments, dataset.schema), identity, rows, lists, nbytes,
        pieces if kind == "parquet" else None,
    )  # fmt: skip


def _scan(files: Iterable[Any], schema: pa.Schema, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for file in files:
        with _readable(file.path, schema.names):
            if isinstance(file.format, pads.CsvFileFormat):
                yield from text_batches(file, schema, columns)
                continue
            yield from file.to_batches(
                columns=columns, schema=schema, batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1
            )


def _open_frame(frame: Any) -> TableReader:
    """Open a table in memory, or a Hugging Face data set."""
    kind = f"{type(frame).__module__.partition('.')[0]}.{type(frame).__name__}"
    if isinstance(frame, pa.RecordBatch):
        table = pa.Table.from_batches([frame])
    elif isinstance(frame, pa.Table):
        table = frame
    elif kind == "pandas.DataFrame":
        with _readable("the pandas.DataFrame"):
            table = pa.Table.from_pandas(frame, preserve_index=False)
    elif kind == "polars.DataFrame":
        table = frame.to_arrow()
    elif kind == "datasets.Dataset":
        return _open_dataset(frame)
    elif kind == "datasets.DatasetDict":
        raise ValueError(f"a DatasetDict was given; give one of its splits: {', '.join(frame)}")
    else:
        raise ValueError(
            f"a table must be a path, a list of paths, a pandas or polars DataFrame, a pyarrow Table or a "
            f"datasets.Dataset, got {type(frame).__name__}"
        )
    name = f"the {kind}"
    if table.num_rows == 0:
        raise ValueError(f"{name} has no rows")

    def identity() -> str:
        digest = hashlib.blake2b(str(table.schema).encode(), digest_size=16)
        for batch in table.to_batches(max_chunksize=BATCH_ROWS):
            digest.update(pa.record_batch(batch.columns, names=table.column_names).serialize())
        return digest.hexdigest()

    def scan(columns: list[str]) -> Iterable[pa.RecordBatch]:
        read: Iterable[pa.RecordBatch] = table.select(columns).to_batches(max_chunksize=BATCH_ROWS)
        return read

    return TableReader(name, table.schema, scan, identity, table.num_rows, nbytes=table.nbytes)


def _open_dataset(data: Any) -> TableReader:

    if len(data) == 0:
        raise ValueError("the datasets.Dataset has no rows")

    def scan(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for table in data.select_columns(columns).with_format("arrow").iter(BATCH_ROWS):
            yield from table.to_batches()

    return TableReader(
        "the datasets.Dataset", data.features.arrow_schema, scan, lambda: str(data._fingerprint), len(data)
    )


@contextmanager
def _readable(name: str, columns: Sequence[str] = ()) -> Iterator[None]:
    """Replace Arrow's errors by a one-line ValueError that names the file, line and column, and what to do."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        text = re.sub(
            r"^Error creating dataset\..*? input source '.*?': (Invalid: )?", "", " ".join(str(error).split())
        )
        named = {str(place): repr(column) for place, column in enumerate(columns)}
        text = re.sub(r"In CSV column #(\d+): ", lambda found: f"column {named.get(found[1], found[1])}, ", text)
        text, advice = re.sub(r"Row #(\d+)", r"line \1", text), ""
        if "conversion error" in text or "JSON parse error" in text or "tried to convert" in text:
            advice = "; a column mixes types: make it one type, or name it, e.g. types={'user_id': 'string'}"
        elif "utf-8" in text or "UTF8" in text:
            advice = f"; {_ENCODING}"
        elif "multiple columns named" in text:
            advice = "; rename one of them"
        elif re.search("Parquet|magic bytes|thrift|[Cc]orrupt|page header", text):
            advice = "; the file is damaged or not a Parquet file: write it again"
        raise ValueError(f"{name} cannot be read: {text}{advice}") from error
