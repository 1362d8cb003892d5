"""Cascades: TorchRec stages, objectives and the LightningModule. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.cascades.cascade import Cascade as Cascade
    from recsys_topk.cascades.features import FeatureEmbedding as FeatureEmbedding
    from recsys_topk.cascades.inference import CascadeResult as CascadeResult
    from recsys_topk.cascades.inference import apply_quotas as apply_quotas
    from recsys_topk.cascades.module import CascadeModule as CascadeModule
    from recsys_topk.cascades.objectives import CascadeObjective as CascadeObjective
    from recsys_topk.cascades.objectives import ObjectiveOutput as ObjectiveOutput
    from recsys_topk.cascades.stage import Stage as Stage
    from recsys_topk.cascades.stage import StageConfig as StageConfig

__getattr__, __dir__ = attach(__name__)
