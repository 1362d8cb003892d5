"""A cascade: stages in order, each with a quota."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage, StageConfig, registry
from recsys_topk.cascades.tables import FusedOptimizer
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Schema
from recsys_topk.trust import inspect_names


class Cascade(nn.Module):
    """Stages in order. Each stage scores the whole list and passes on its `quota` best items.

    Args:
        schema: The features.
        stages: The configurations of the stages, first stage first. A quota must not exceed the one before it.
        dim: Embedding dimension, one for all tables or by table name.
        share_embeddings: All stages use one set of tables. By default each stage has its own tables, because stages are
            deployed separately.
        fused: Optimizer that updates the tables inside backward; None = no such update.
    """

    def __init__(
        self,
        schema: Schema,
        stages: Sequence[StageConfig | Mapping[str, Any]],
        dim: int | Mapping[str, int] = 8,
        share_embeddings: bool = False,
        fused: FusedOptimizer | None = None,
    ) -> None:
        super().__init__()
        for stage in stages:
            if isinstance(stage, Mapping):  # from a checkpoint
                inspect_names(stage, "the description of a stage")
        configs = [StageConfig.of(stage) for stage in stages]
        _check(configs)
        self.configs = configs
        make_embedding = partial(FeatureEmbedding, schema, dim, fused=fused)
        shared = make_embedding() if share_embeddings else None
        self.stages = nn.ModuleDict({config.name: _build(config, shared or make_embedding()) for config in configs})

    @property
    def names(self) -> list[str]:
        """Names of the stages, in order."""
        return [config.name for config in self.configs]

    @property
    def quotas(self) -> list[int]:
        """Number of items that each stage passes on."""
        return [config.quota for config in self.configs]

    def forward(self, batch: CascadeBatch) -> list[Tensor]:
        """Return the scores of each stage over the whole list, each (B, N)."""
        return [stage(batch) for stage in self.stages.values()]


def _build(config: StageConfig, embedding: FeatureEmbedding) -> Stage:
    cls = registry.resolve(config.kind)
    try:
        return cls(embedding, **config.options)
    except TypeError as error:
        raise ValueError(f"stage {config.name!r} ({config.kind}) does not accept these options: {error}") from error


def _check(configs: Sequence[StageConfig]) -> None:
    if not configs:
        raise ValueError("a cascade needs at least one stage")
    names = [config.name for config in configs]
    if len(set(names)) != len(names):
        raise ValueError(f"stage names must be unique, got {names}")
    quotas = [config.quota for config in configs]
    if any(later > earlier for earlier, later in pairwise(quotas)):
        raise ValueError(f"a quota must not exceed that of the stage before it, got quotas {quotas} for stages {names}")
