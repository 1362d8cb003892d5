"""Writes what a cascade does to every candidate as one Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class PredictionWriter(BasePredictionWriter):  # type: ignore[misc]  # lightning is untyped here
    """Writes request id, item id, the score of each stage, kept or not, and rank, batch by batch.

    The file appears under its name when it is whole; an interrupted run leaves none. With several processes each
    writes a file of its own, numbered by rank.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._writer: pq.ParquetWriter | None = None

    def write_on_batch_end(self, trainer: pl.Trainer, _: Any, prediction: dict[str, Tensor], *rest: Any) -> None:
        """Append one batch."""
        rows = pa.table({name: column.numpy() for name, column in prediction.items()})
        if self._writer is None:
            if trainer.world_size > 1:
                self.path = self.path.with_stem(f"{self.path.stem}-{trainer.global_rank}")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._partial, rows.schema)
        self._writer.write_table(rows)

    def on_predict_end(self, *_: Any) -> None:
        """Close the file and give it its name."""
        if self._close():
            self._partial.replace(self.path)

    def on_exception(self, *_: Any) -> None:
        """Remove what was begun."""
        if self._close():
            self._partial.unlink(missing_ok=True)

    def _close(self) -> bool:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return writer is not None

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f".{self.path.name}.partial")
