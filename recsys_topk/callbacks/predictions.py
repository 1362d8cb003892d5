"""Writes what a cascade does to every candidate as one Parquet file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from recsys_topk.files import whole_file


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
        self._open = ExitStack()
        self._writer: pq.ParquetWriter | None = None

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Take the folder of the first process."""
        self.path = trainer.strategy.broadcast(self.path)

    def write_on_batch_end(self, trainer: pl.Trainer, _: Any, prediction: dict[str, Tensor], *rest: Any) -> None:
        """Append one batch."""
        rows = pa.table({name: column.numpy() for name, column in prediction.items()})
        if self._writer is None:
            if trainer.world_size > 1:
                self.path = self.path.with_stem(f"{self.path.stem}-{trainer.global_rank}")
            file = self._open.enter_context(whole_file(self.path))
            self._writer = self._open.enter_context(pq.ParquetWriter(file, rows.schema))
        self._writer.write_table(rows)

    def on_predict_end(self, *_: Any) -> None:
        """Close the file and give it its name."""
        self._writer = None
        self._open.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove what was begun."""
        self._writer = None
        self._open.__exit__(type(exception), exception, exception.__traceback__)
