"""Memory-map prepared Arrow files with Hugging Face `datasets`."""

from __future__ import annotations

from pathlib import Path

from recsys_topk.tabular.arrow import columns_of
from recsys_topk.types import Array


def read_columns(path: Path) -> dict[str, Array]:
    """Memory-map an Arrow file and return its columns as arrays, without a copy where possible."""
    from datasets import Dataset

    return columns_of(Dataset.from_file(str(path)).data.table)
