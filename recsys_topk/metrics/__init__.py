"""Metrics of lists and cascades. `functional` needs torch only; the classes are torchmetrics metrics.

The classes are imported on first use, so that `recsys_topk.metrics.functional` works without torchmetrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.metrics.configured import configured_metrics
    from recsys_topk.metrics.mean import ListMean
    from recsys_topk.metrics.ranked import DCGAt, JointRecall, KendallTau, MAPAt, MRRAt, NDCGAt, PrecisionAt, RecallAt
    from recsys_topk.metrics.selection_mass import SelectionMass

__all__ = [
    "DCGAt",
    "JointRecall",
    "KendallTau",
    "ListMean",
    "MAPAt",
    "MRRAt",
    "NDCGAt",
    "PrecisionAt",
    "RecallAt",
    "SelectionMass",
    "configured_metrics",
]

__getattr__, __dir__ = attach(__name__)
