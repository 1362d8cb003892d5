"""Data: the batch, RecFlow, its simulator, negative expansion.

Names are imported on first use, so that the batch and the schema need torch only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys_topk.datamodules.batch import CascadeBatch as CascadeBatch
    from recsys_topk.datamodules.ground_truth import GroundTruth as GroundTruth
    from recsys_topk.datamodules.ground_truth import reference_recalls as reference_recalls
    from recsys_topk.datamodules.negatives import expand as expand
    from recsys_topk.datamodules.recflow import RecFlowDataModule as RecFlowDataModule
    from recsys_topk.datamodules.schema import Schema as Schema
    from recsys_topk.datamodules.simulator import simulate as simulate
    from recsys_topk.datamodules.streaming import DayStream as DayStream
    from recsys_topk.datamodules.world import WorldConfig as WorldConfig

_HOME = {
    "CascadeBatch": "batch",
    "DayStream": "streaming",
    "GroundTruth": "ground_truth",
    "RecFlowDataModule": "recflow",
    "Schema": "schema",
    "WorldConfig": "world",
    "expand": "negatives",
    "reference_recalls": "ground_truth",
    "simulate": "simulator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
