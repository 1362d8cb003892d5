"""A simulated multi-stage recommender that writes RecFlow's files, and the ground truth of the simulation.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.datamodules.simulator.embedded import embedded_root as embedded_root
    from recsys_topk.datamodules.simulator.ground_truth import GroundTruth as GroundTruth
    from recsys_topk.datamodules.simulator.ground_truth import reference_recalls as reference_recalls
    from recsys_topk.datamodules.simulator.simulation import simulate as simulate
    from recsys_topk.datamodules.simulator.world import World as World
    from recsys_topk.datamodules.simulator.world import WorldConfig as WorldConfig

__getattr__, __dir__ = attach(__name__)
