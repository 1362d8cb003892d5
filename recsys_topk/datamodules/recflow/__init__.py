"""The RecFlow data set: reading its files, the prepared cache, batches, and the data module.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.datamodules.recflow.batch_maker import BatchMaker as BatchMaker
    from recsys_topk.datamodules.recflow.cache import DayCache as DayCache
    from recsys_topk.datamodules.recflow.cache import PreparedDay as PreparedDay
    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule as RecFlowDataModule
    from recsys_topk.datamodules.recflow.days import select_days as select_days
    from recsys_topk.datamodules.recflow.files import RecFlowFiles as RecFlowFiles
    from recsys_topk.datamodules.recflow.layout import LAYOUTS as LAYOUTS
    from recsys_topk.datamodules.recflow.layout import Group as Group
    from recsys_topk.datamodules.recflow.layout import Layout as Layout
    from recsys_topk.datamodules.recflow.pickles import FormatError as FormatError
    from recsys_topk.datamodules.recflow.shard import DayShard as DayShard
    from recsys_topk.datamodules.recflow.streaming import DayStream as DayStream

__getattr__, __dir__ = attach(__name__)
