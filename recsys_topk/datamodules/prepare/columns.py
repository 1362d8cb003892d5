"""Open prepared tables: Arrow streams are memory-mapped with Hugging Face `datasets`, Parquet parts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from recsys_topk.files import disk_error
from recsys_topk.tabular.arrow import columns_of
from recsys_topk.tabular.tables.columns import is_list, one_chunk
from recsys_topk.types import Array


def read_columns(path: Path) -> dict[str, Array]:
    """Memory-map an Arrow file and return its columns as arrays, without a copy where possible."""
    import pyarrow as pa
    from datasets import Dataset

    try:
        return columns_of(Dataset.from_file(str(path)).data.table)
    except (pa.ArrowException, OSError, ValueError) as error:
        if disk_error(error):
            raise
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}; prepare the data again") from error


def find_table(folder: Path, name: str) -> Path | None:
    """Return the place of a prepared table: NAME.arrow, NAME.parquet, or the folder NAME of Parquet parts."""
    places = (folder / f"{name}.arrow", folder / f"{name}.parquet", folder / name)
    return next((place for place in places if place.exists()), None)


def read_table(path: Path) -> dict[str, Array]:
    """Return the columns of a prepared table. Parquet parts are read in the order of their names, into memory.

    Raises:
        ValueError: The table cannot be read, or the lists of a column differ in length.
    """
    if path.suffix == ".arrow":
        return read_columns(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    try:
        table = pa.concat_tables([pq.read_table(part) for part in parts])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    return {name: _array(one_chunk(table.column(name)), f"column {name!r} of {path}") for name in table.column_names}


def _array(column: Any, name: str) -> Array:
    if not is_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    lengths = np.unique(np.asarray(pc.list_value_length(column)))
    if lengths.size != 1:
        raise ValueError(f"{name} has lists of different lengths; every row must have the same number of ids or values")
    return np.asarray(pc.list_flatten(column)).reshape(-1, int(lengths[0]))
