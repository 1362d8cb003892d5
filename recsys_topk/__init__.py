"""Train recommender cascades so that the right *set* of items survives.

Importing this module imports neither torch nor any optional dependency; the public names are imported on first use:

    from recsys_topk import CascadeModule, RecFlowDataModule, StageConfig, TrainingRun

- `recsys_topk.ops`: the hot loops and the switch between their backends (torch and numpy only)
- `recsys_topk.operators`: differentiable top-k membership (torch and numpy only)
- `recsys_topk.losses`: ranking losses behind one interface (torch and numpy only)
- `recsys_topk.metrics`: joint and per-stage recall, NDCG, Kendall tau
- `recsys_topk.cascades`: TorchRec stages, objectives and the LightningModule
- `recsys_topk.datamodules`: batches and schemas, your own interactions and lists, RecFlow, its simulator, negatives
- `recsys_topk.strategies`: sharded TorchRec tables as a Lightning strategy
- `recsys_topk.serving`: export of the stages, index, recommendations and HTTP service (the last three without torch)
- `recsys_topk.runs`: a training run as an object, groups of runs, statistics over runs
- `recsys_topk.reference`: published code reproduced exactly, including its faults
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.cascades import CascadeModule as CascadeModule
    from recsys_topk.cascades import CascadeObjective as CascadeObjective
    from recsys_topk.cascades import ObjectiveOutput as ObjectiveOutput
    from recsys_topk.cascades import Stage as Stage
    from recsys_topk.cascades import StageConfig as StageConfig
    from recsys_topk.datamodules import CascadeBatch as CascadeBatch
    from recsys_topk.datamodules import CascadeDataModule as CascadeDataModule
    from recsys_topk.datamodules import Feature as Feature
    from recsys_topk.datamodules import InteractionsDataModule as InteractionsDataModule
    from recsys_topk.datamodules import ListsDataModule as ListsDataModule
    from recsys_topk.datamodules import RecFlowDataModule as RecFlowDataModule
    from recsys_topk.datamodules import Schema as Schema
    from recsys_topk.datamodules import Table as Table
    from recsys_topk.losses import DFTopKLoss as DFTopKLoss
    from recsys_topk.losses import RankingLoss as RankingLoss
    from recsys_topk.metrics import JointRecall as JointRecall
    from recsys_topk.metrics import RecallAt as RecallAt
    from recsys_topk.operators import SoftSelection as SoftSelection
    from recsys_topk.operators import TopKOperator as TopKOperator
    from recsys_topk.runs import TrainingRun as TrainingRun
    from recsys_topk.serving.recommend import CascadeRecommender as CascadeRecommender
    from recsys_topk.strategies.torchrec import TorchRecStrategy as TorchRecStrategy

__version__ = "0.3.0"

__getattr__, __dir__ = attach(
    __name__, ["cascades", "datamodules", "losses", "metrics", "operators", "ops", "reference"]
)
