"""Data: the batch, its schema, negatives, and one sub-package per source.

Names are imported on first use, so that the batch and the schema need torch only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule as CascadeDataModule
    from recsys_topk.datamodules.base import available as available
    from recsys_topk.datamodules.base import get as get
    from recsys_topk.datamodules.base import registry as registry
    from recsys_topk.datamodules.base import restore as restore
    from recsys_topk.datamodules.batch import CascadeBatch as CascadeBatch
    from recsys_topk.datamodules.folders import cache_home as cache_home
    from recsys_topk.datamodules.hyper_parameters import data_spec as data_spec
    from recsys_topk.datamodules.id_counter import IdCounter as IdCounter
    from recsys_topk.datamodules.interactions.datamodule import InteractionsDataModule as InteractionsDataModule
    from recsys_topk.datamodules.lists.datamodule import ListsDataModule as ListsDataModule
    from recsys_topk.datamodules.loader import ShardLoader as ShardLoader
    from recsys_topk.datamodules.negatives import Catalogue as Catalogue
    from recsys_topk.datamodules.negatives import NegativeSource as NegativeSource
    from recsys_topk.datamodules.negatives import expand as expand
    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule as RecFlowDataModule
    from recsys_topk.datamodules.recflow.streaming import DayStream as DayStream
    from recsys_topk.datamodules.schema import Feature as Feature
    from recsys_topk.datamodules.schema import Schema as Schema
    from recsys_topk.datamodules.schema import Table as Table
    from recsys_topk.datamodules.shard import Shard as Shard
    from recsys_topk.datamodules.shard import ShardBatch as ShardBatch
    from recsys_topk.datamodules.shard import TensorShard as TensorShard
    from recsys_topk.datamodules.simulator.ground_truth import GroundTruth as GroundTruth
    from recsys_topk.datamodules.simulator.ground_truth import reference_recalls as reference_recalls
    from recsys_topk.datamodules.simulator.simulation import simulate as simulate
    from recsys_topk.datamodules.simulator.world import WorldConfig as WorldConfig
    from recsys_topk.datamodules.vocabulary import CompactVocabulary as CompactVocabulary
    from recsys_topk.datamodules.vocabulary import DenseVocabulary as DenseVocabulary
    from recsys_topk.datamodules.vocabulary import HashVocabulary as HashVocabulary
    from recsys_topk.datamodules.vocabulary import Vocabulary as Vocabulary
    from recsys_topk.datamodules.vocabulary import fit_vocabulary as fit_vocabulary
    from recsys_topk.datamodules.vocabulary import load_vocabularies as load_vocabularies
    from recsys_topk.datamodules.vocabulary import save_vocabularies as save_vocabularies
    from recsys_topk.datamodules.vocabulary_options import VocabularyOptions as VocabularyOptions

_HOME = {
    "CascadeBatch": "batch",
    "CascadeDataModule": "base",
    "Catalogue": "negatives",
    "CompactVocabulary": "vocabulary",
    "DayStream": "recflow.streaming",
    "DenseVocabulary": "vocabulary",
    "Feature": "schema",
    "GroundTruth": "simulator.ground_truth",
    "HashVocabulary": "vocabulary",
    "IdCounter": "id_counter",
    "InteractionsDataModule": "interactions.datamodule",
    "ListsDataModule": "lists.datamodule",
    "NegativeSource": "negatives",
    "RecFlowDataModule": "recflow.datamodule",
    "Schema": "schema",
    "Shard": "shard",
    "ShardBatch": "shard",
    "ShardLoader": "loader",
    "Table": "schema",
    "TensorShard": "shard",
    "Vocabulary": "vocabulary",
    "VocabularyOptions": "vocabulary_options",
    "WorldConfig": "simulator.world",
    "available": "base",
    "cache_home": "folders",
    "data_spec": "hyper_parameters",
    "expand": "negatives",
    "fit_vocabulary": "vocabulary",
    "get": "base",
    "load_vocabularies": "vocabulary",
    "reference_recalls": "simulator.ground_truth",
    "registry": "base",
    "restore": "base",
    "save_vocabularies": "vocabulary",
    "simulate": "simulator.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
