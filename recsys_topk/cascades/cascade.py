"""A cascade: stages in order, each with a quota."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.sampled_negatives import hardest_columns, with_columns
from recsys_topk.cascades.stage import Stage, StageConfig, registry
from recsys_topk.cascades.tables import FusedOptimizer
from recsys_topk.checks import check_not_negative
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Schema
from recsys_topk.trust import inspect_names


class Cascade(nn.Module):
    """Stages in order. Each stage scores the whole list and passes on its `quota` best items.

    The score of stage m is s_m = f_m, or s_m = f_m + a_m s_{m-1} with a learned scale a_m if the stage adds the scores
    of the stage before it (`StageConfig.previous`).

    Args:
        schema: The features.
        stages: The configurations of the stages, first stage first. A quota must not exceed the one before it.
        dim: Embedding dimension, one for all tables or by table name; ``"auto"`` = by the number of rows, at most 64.
        share_embeddings: All stages use one set of tables. By default each stage has its own tables, because stages are
            deployed separately.
        fused: Optimizer that updates the tables inside backward; None = no such update.
        init_std: Tables are initialised from N(0, init_std^2).
        tie_history: The history reads the tables of the items. False = it has separate tables.
    """

    def __init__(
        self,
        schema: Schema,
        stages: Sequence[StageConfig | Mapping[str, Any]],
        dim: int | Mapping[str, int] | Literal["auto"] = 8,
        share_embeddings: bool = False,
        fused: FusedOptimizer | None = None,
        init_std: float = 1.0,
        tie_history: bool = True,
    ) -> None:
        super().__init__()
        for stage in stages:
            if isinstance(stage, Mapping):  # from a checkpoint
                inspect_names(stage, "the description of a stage")
        configs = [StageConfig.of(stage) for stage in stages]
        _check(configs)
        self.configs = configs
        check_not_negative("init_std", init_std)
        make_embedding = partial(FeatureEmbedding, schema, dim, init_std, fused, tie_history=tie_history)
        shared = make_embedding() if share_embeddings else None
        self.stages = nn.ModuleDict({config.name: _build(config, shared or make_embedding()) for config in configs})
        self.scales = nn.ParameterDict(
            {config.name: torch.ones(()) for config in configs if config.previous != "ignore"}
        )

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
        scores: list[Tensor] = []
        for config, stage in zip(self.configs, self.stages.values(), strict=True):
            scores.append(self.add_previous(config.name, stage(batch), scores[-1] if scores else None))
        return scores

    def add_previous(self, name: str, scores: Tensor, previous: Tensor | None) -> Tensor:
        """Return the scores of a stage, with those of the stage before it added if the stage adds them.

        Args:
            name: Name of the stage.
            scores: Scores that the stage computed, (B, N).
            previous: The scores of the stage before it for the same candidates; None for the first stage.
        """
        if name not in self.scales or previous is None:
            return scores
        detached = self.configs[self.names.index(name)].previous == "add_detached"
        scale: Tensor = self.scales[name]
        return scores + scale * (previous.detach() if detached else previous)

    def training_lists(self, batch: CascadeBatch) -> tuple[list[Tensor], list[CascadeBatch]]:
        """Return the scores of each stage, and the lists that it trains on (`StageConfig.hard_negatives`).

        Without negatives per stage these are the scores of `forward`, and the batch itself for each stage. A list of a
        later stage is a part of the list of the stage before it, whose scores select the negatives.
        """
        scores: list[Tensor] = []
        batches: list[CascadeBatch] = []
        for config, stage in zip(self.configs, self.stages.values(), strict=True):
            previous = scores[-1] if scores else None
            if previous is not None and 0 < config.hard_negatives + config.random_negatives < batch.sampled:
                columns = hardest_columns(batch, previous, config.hard_negatives, config.random_negatives)
                batch, previous = with_columns(batch, columns), previous.gather(1, columns)
            scores.append(self.add_previous(config.name, stage(batch), previous))
            batches.append(batch)
        return scores, batches

    def scorer(self, name: str) -> Stage | StageSum:
        """Return a function from a batch to the scores of one stage, including the scores that the stage adds."""
        number = self.names.index(name)
        stage = self.stages[name]
        assert isinstance(stage, Stage)
        return StageSum(self, number) if name in self.scales else stage


class StageSum:
    """A function from a batch to the scores of a stage that adds those of the stages before it. It has no towers.

    Args:
        cascade: The cascade.
        number: Index of the stage.
    """

    towers = None

    def __init__(self, cascade: Cascade, number: int) -> None:
        self.name, self.cascade = cascade.names[number], cascade
        self.stage = cascade.stages[self.name]
        self.before = cascade.scorer(cascade.names[number - 1])

    def __call__(self, batch: CascadeBatch) -> Tensor:
        """Return the scores, (B, N)."""
        return self.cascade.add_previous(self.name, self.stage(batch), self.before(batch))


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
    first = configs[0]
    if first.previous != "ignore":
        raise ValueError(f"stage {first.name!r} is the first, so there are no scores to add; use previous: ignore")
    if first.hard_negatives:
        raise ValueError(
            f"stage {first.name!r} is the first, and the stage before selects the negatives; use --model.hard_negatives"
        )
