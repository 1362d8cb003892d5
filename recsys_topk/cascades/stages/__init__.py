"""The stages, one file each, registered by name. Classes are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.cascades.stages.din import DIN as DIN
    from recsys_topk.cascades.stages.mlp import MLPStage as MLPStage
    from recsys_topk.cascades.stages.transitions import Transitions as Transitions
    from recsys_topk.cascades.stages.two_tower import TwoTower as TwoTower

__getattr__, __dir__ = attach(__name__)
