"""Configured metrics, including a custom one."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from recsys_topk.metrics import JointRecall, KendallTau, ListMean, NDCGAt, RecallAt, configured_metrics
from recsys_topk.metrics.functional import top
from recsys_topk.metrics.mean import registry
from recsys_topk.operators import DFTopK

QUOTAS = {"retrieval": 30, "ranking": 20}


class OwnPrecision(ListMean):
    """The example of docs/metrics.md."""

    name: ClassVar[str] = "own_precision"

    def __init__(self, m: int, positive_above: float = 0.0) -> None:
        super().__init__()
        self.m, self.positive_above = m, positive_above

    @property
    def label(self) -> str:
        return f"{self.name}@{self.m}"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        hits = top(scores, self.m, mask) & (labels > self.positive_above)
        self.add(hits.sum(-1) / self.m, torch.ones_like(hits[:, 0]))


def test_custom_metric_is_found_by_name_and_class_path_and_gets_its_arguments() -> None:
    for name in ("own_precision", f"{__name__}.OwnPrecision"):
        made = configured_metrics([name], k=10, quotas=QUOTAS, positive_above=7.0)
        assert list(made) == ["retrieval_own_precision@30", "ranking_own_precision@20"]
        assert [(metric.m, metric.positive_above, metric.stage) for metric in made.values()] == [
            (30, 7.0, 0),
            (20, 7.0, 1),
        ]
    metric = OwnPrecision(2)
    metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
    assert metric.compute() == 0.5


def test_every_registered_metric_can_be_configured_by_its_name_alone() -> None:
    names = {"joint_recall": JointRecall, "recall": RecallAt, "ndcg": NDCGAt, "kendall_tau": KendallTau}
    assert names.items() <= registry.classes().items()
    for name, cls in names.items():
        made = configured_metrics([name], k=10, quotas=QUOTAS)
        assert {type(metric) for metric in made.values()} == {cls}
        assert [metric.stage for metric in made.values()] == ([None] if cls.whole_cascade else [0, 1])


def test_class_that_is_no_metric_raises() -> None:
    with pytest.raises((TypeError, ValueError), match="ListMean"):
        configured_metrics(["recsys_topk.losses.DFTopKLoss"], k=10, quotas=QUOTAS)


def test_selection_mass_uses_the_operator_of_the_loss() -> None:
    """By its definition: the sum of sigmoid((x - theta) / tau) over the valid items, divided by k."""
    made = configured_metrics(["selection_mass"], k=2, quotas=QUOTAS, operator=DFTopK(tau=0.5))
    assert list(made) == ["retrieval_selection_mass@2", "ranking_selection_mass@2"]
    metric = made["ranking_selection_mass@2"]
    assert metric.stage == 1
    assert not metric.state_dict()
    metric.update(torch.tensor([[4.0, 3.0, 1.0, 9.0]]), torch.zeros(1, 4), torch.tensor([[True, True, True, False]]))
    expected = sum(1 / (1 + math.exp(-(score - 2.0) / 0.5)) for score in (4.0, 3.0, 1.0)) / 2
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)


def test_selection_mass_without_operator_or_with_a_configured_one_raises() -> None:
    with pytest.raises(ValueError, match="measures the top-k operator of the loss, but this loss has none"):
        configured_metrics(["selection_mass"], k=2, quotas=QUOTAS)
    with pytest.raises(ValueError, match="no option 'operator'"):
        configured_metrics([{"metric": "selection_mass", "operator": "hard"}], k=2, quotas=QUOTAS, operator=DFTopK())
