"""Every registered stage keeps the contract with every registered encoder of histories."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recsys_topk.cascades.encoders.base import registry as encoders
from recsys_topk.cascades.features import Embedded, FeatureEmbedding
from recsys_topk.cascades.stage import registry as stages
from recsys_topk.cascades.stages import DIN, MLPStage, TwoTower
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Feature, Schema
from recsys_topk.testing import check_stage

OPTIONS = {"transformer": {"width": 8, "blocks": 2, "dropout": 0.1}}


@pytest.mark.parametrize("history", encoders.available())
@pytest.mark.parametrize("kind", stages.available())
def test_every_stage_keeps_the_contract_with_every_encoder(kind: str, history: str) -> None:
    chosen = {"kind": history, **OPTIONS.get(history, {})}
    check_stage(lambda embedding: stages.resolve(kind)(embedding, hidden=[8, 4], history=chosen))


@pytest.mark.parametrize("kind", stages.available())
def test_stages_keep_the_contract_with_batch_norm_and_dropout(kind: str) -> None:
    check_stage(lambda embedding: stages.resolve(kind)(embedding, hidden=[8, 4], batch_norm=0.9, dropout=0.2))


def test_two_towers_without_hidden_layers_keep_the_contract() -> None:
    check_stage(lambda embedding: TwoTower(embedding, hidden=[], history="recency", transitions=4))


def test_stage_without_request_and_history_keeps_the_contract() -> None:
    check_stage(MLPStage, Schema((), (), (), (Feature("bm25", kind="vector", size=3),)))


class ReadsHost(MLPStage):
    """Reads a value on the host."""

    def score(self, batch: CascadeBatch) -> Tensor:
        return super().score(batch) * (2.0 if bool(batch.mask.all()) else 1.0)


class ComparesLists(MLPStage):
    """Subtracts the mean of the batch."""

    def score(self, batch: CascadeBatch) -> Tensor:
        scores = super().score(batch)
        return scores - scores.mean()


class AbsolutePositions(DIN):
    """Scores depend on the padded length of the history."""

    def score(self, batch: CascadeBatch) -> Tensor:
        return super().score(batch) * batch.history.shape[1]


class Unused(MLPStage):
    """Has a parameter that is not used."""

    def __init__(self, embedding: FeatureEmbedding) -> None:
        super().__init__(embedding)
        self.unused = torch.nn.Parameter(torch.zeros(1))


class OtherVectors(TwoTower):
    """Vectors that depend on the pool."""

    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        return super().encode_items(embedded, real).cumsum(0)


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (ReadsHost, "no values are read on the host"),
        (ComparesLists, "lists do not influence each other"),
        (ComparesLists, "masked candidates have no effect"),
        (AbsolutePositions, "padding of histories has no effect"),
        (Unused, "every parameter gets a finite gradient"),
        (OtherVectors, "order of the pool does not matter"),
    ],
)
def test_planted_faults_are_found(stage: type, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        check_stage(stage, rules=[rule])
