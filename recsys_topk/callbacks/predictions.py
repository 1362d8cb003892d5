"""Predictions as one Parquet file: scores, rank and the dropping stage of every candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.files import whole_file
from recsys_topk.tabular.schema import VARIANT


class PredictionWriter(BasePredictionWriter):  # type: ignore[misc]  # lightning is untyped here
    """Writes one row per candidate, batch by batch.

    | column | |
    |---|---|
    | `shard` | the part of the data, e.g. the day |
    | `request_id`, `user_id`, `item_id` | the ids of the source; no `user_id` if the data have no users |
    | `group`, `label` | the sample group (``sampled`` = a sampled negative) and the label |
    | `score_STAGE` | the score of each stage |
    | `kept`, `rank` | whether the candidate survives all stages, and its rank; null if it does not |
    | `dropped_by` | the stage that dropped the candidate; null if none did |

    The file is renamed when it is complete; an interrupted run leaves none. With several processes, each process writes
    a separate file, numbered by rank.

    Args:
        path: The file to write.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._open = ExitStack()
        self._writer: pq.ParquetWriter | None = None

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Use the path of the first process."""
        self.path = trainer.strategy.broadcast(self.path)

    def write_on_batch_end(
        self, trainer: pl.Trainer, model: Any, prediction: dict[str, Tensor], _: Any, batch: CascadeBatch, *rest: Any
    ) -> None:
        """Append one batch."""
        rows = table_of(prediction, batch, model.schema.groups, model.cascade.names, trainer.datamodule)
        if self._writer is None:
            if trainer.world_size > 1:
                self.path = self.path.with_stem(f"{self.path.stem}-{trainer.global_rank}")
            file = self._open.enter_context(whole_file(self.path))
            self._writer = self._open.enter_context(pq.ParquetWriter(file, rows.schema))
        self._writer.write_table(rows)

    def on_predict_end(self, *_: Any) -> None:
        """Close and rename the file."""
        self._writer = None
        self._open.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the incomplete file."""
        self._writer = None
        self._open.__exit__(type(exception), exception, exception.__traceback__)


def table_of(
    prediction: Mapping[str, Tensor],
    batch: CascadeBatch,
    groups: Sequence[str],
    stages: Sequence[str],
    data: pl.LightningDataModule | None = None,
) -> pa.Table:
    """Return one batch and its result of `CascadeModule.predict_step` as the rows that `PredictionWriter` writes.

    The data module maps item and request ids to those of the source; without it the ids of the batch are written.
    """
    values = {name: column.numpy() for name, column in prediction.items()}
    passed, group, dropped = values.pop("passed"), values.pop("group"), ~values["kept"]
    number = len(passed)
    values["item_id"] = values["item_id"] % VARIANT
    if isinstance(data, CascadeDataModule):
        values["request_id"] = data.request_names(batch.shard, values["request_id"])
        values["item_id"] = data.item_names(values["item_id"])
    shard = _names([batch.shard], np.zeros(number, int))
    columns: dict[str, Any] = {"shard": shard, "request_id": values["request_id"]}
    if batch.users:
        sizes = batch.mask.sum(1).cpu().numpy()
        kind = None if isinstance(batch.users[0], int) else pa.string()
        columns["user_id"] = pa.array(batch.users, kind).take(pa.array(np.repeat(np.arange(len(sizes)), sizes)))
    columns |= {"item_id": values["item_id"], "group": _names([*groups, "sampled"], group), **values}
    columns["rank"] = pa.array(values["rank"], mask=dropped)
    columns["dropped_by"] = _names(stages, passed, ~dropped)
    return pa.table(columns)


def _names(names: Sequence[str], numbers: Any, missing: Any = None) -> pa.Array:
    """Return `names[number]` for each number; null where `missing` is true."""
    return pa.array(list(names), pa.string()).take(pa.array(numbers, mask=missing))
