"""RecFlow: its files, the cache they are prepared into, batches of them, and the data module.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOME = {
    "BatchMaker": "batch_maker",
    "DayCache": "cache",
    "DayShard": "shard",
    "DayStream": "streaming",
    "FormatError": "pickles",
    "Group": "layout",
    "LAYOUTS": "layout",
    "Layout": "layout",
    "PreparedDay": "cache",
    "RecFlowDataModule": "datamodule",
    "RecFlowFiles": "files",
    "select_days": "days",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
