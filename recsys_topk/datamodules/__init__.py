"""Data modules: the batch, its schema, sampled negatives, and one sub-package per data source.

Names are imported on first use. The batch and the schema therefore need only torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule as CascadeDataModule
    from recsys_topk.datamodules.base import available as available
    from recsys_topk.datamodules.base import get as get
    from recsys_topk.datamodules.base import registry as registry
    from recsys_topk.datamodules.base import restore as restore
    from recsys_topk.datamodules.batch import CascadeBatch as CascadeBatch
    from recsys_topk.datamodules.catalogue import Catalogue as Catalogue
    from recsys_topk.datamodules.hyper_parameters import data_spec as data_spec
    from recsys_topk.datamodules.interactions.datamodule import InteractionsDataModule as InteractionsDataModule
    from recsys_topk.datamodules.lists.datamodule import ListsDataModule as ListsDataModule
    from recsys_topk.datamodules.loader import ShardLoader as ShardLoader
    from recsys_topk.datamodules.negatives.expansion import NegativeSource as NegativeSource
    from recsys_topk.datamodules.negatives.expansion import expand as expand
    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule as RecFlowDataModule
    from recsys_topk.datamodules.recflow.streaming import DayStream as DayStream
    from recsys_topk.datamodules.shard import Shard as Shard
    from recsys_topk.datamodules.shard import ShardBatch as ShardBatch
    from recsys_topk.datamodules.shard import TensorShard as TensorShard
    from recsys_topk.datamodules.simulator.ground_truth import GroundTruth as GroundTruth
    from recsys_topk.datamodules.simulator.ground_truth import reference_recalls as reference_recalls
    from recsys_topk.datamodules.simulator.simulation import simulate as simulate
    from recsys_topk.datamodules.simulator.world import WorldConfig as WorldConfig
    from recsys_topk.files import cache_home as cache_home
    from recsys_topk.tabular.ids.counter import IdCounter as IdCounter
    from recsys_topk.tabular.ids.options import VocabularyOptions as VocabularyOptions
    from recsys_topk.tabular.ids.vocabulary import CompactVocabulary as CompactVocabulary
    from recsys_topk.tabular.ids.vocabulary import DenseVocabulary as DenseVocabulary
    from recsys_topk.tabular.ids.vocabulary import HashVocabulary as HashVocabulary
    from recsys_topk.tabular.ids.vocabulary import Vocabulary as Vocabulary
    from recsys_topk.tabular.ids.vocabulary import fit_vocabulary as fit_vocabulary
    from recsys_topk.tabular.ids.vocabulary import load_vocabularies as load_vocabularies
    from recsys_topk.tabular.ids.vocabulary import save_vocabularies as save_vocabularies
    from recsys_topk.tabular.schema import Feature as Feature
    from recsys_topk.tabular.schema import Schema as Schema
    from recsys_topk.tabular.schema import Table as Table

__getattr__, __dir__ = attach(__name__)
