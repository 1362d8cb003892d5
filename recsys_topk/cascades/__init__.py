"""Cascades: TorchRec stages, objectives and the LightningModule. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOME = {
    "Cascade": "cascade",
    "CascadeModule": "module",
    "CascadeObjective": "objectives",
    "CascadeResult": "inference",
    "FeatureEmbedding": "features",
    "ObjectiveOutput": "objectives",
    "Stage": "stage",
    "StageConfig": "stage",
    "apply_quotas": "inference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
