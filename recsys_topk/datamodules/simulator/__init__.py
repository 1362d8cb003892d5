"""A simulated multi-stage recommender that writes RecFlow's files, and the ground truth behind them.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys_topk.datamodules.simulator.embedded import embedded_root as embedded_root
    from recsys_topk.datamodules.simulator.ground_truth import GroundTruth as GroundTruth
    from recsys_topk.datamodules.simulator.ground_truth import reference_recalls as reference_recalls
    from recsys_topk.datamodules.simulator.simulation import simulate as simulate
    from recsys_topk.datamodules.simulator.world import World as World
    from recsys_topk.datamodules.simulator.world import WorldConfig as WorldConfig

_HOME = {
    "GroundTruth": "ground_truth",
    "World": "world",
    "WorldConfig": "world",
    "embedded_root": "embedded",
    "reference_recalls": "ground_truth",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
