"""The quota objective, and the weights with which sampled negatives stand for the deployed pool."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from recsys_topk import CascadeModule, losses
from recsys_topk.callbacks.diagnostics import Diagnostics
from recsys_topk.callbacks.progress import Pace
from recsys_topk.cascades.objectives.base import CascadeObjective, registry
from recsys_topk.cascades.objectives.independent import IndependentObjective
from recsys_topk.cascades.objectives.quota import QuotaObjective
from tests.cascades.test_objectives import lists
from tests.cascades.test_sampled_negatives import RANKER, TWO
from tests.evaluation.test_corpus import Tiny

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def laplace(z: float) -> float:
    return 0.5 * math.exp(z) if z < 0 else 1.0 - 0.5 * math.exp(-z)


LAWS = {"sigmoid": lambda z: 1.0 / (1.0 + math.exp(-z)), "lapsum": laplace}


def loop(x: Tensor, labels: Tensor, mask: Tensor, weights: Tensor, quota: float, tau: float, law: str) -> float:
    """The term of one stage, list by list: bisection for the threshold, then the mean over the positives."""
    terms = []
    for b in range(len(x)):
        valid = [i for i in range(x.shape[1]) if mask[b, i] and weights[b, i] > 0]
        true = sorted((i for i in valid if labels[b, i] > 0), key=lambda i: -float(labels[b, i]))
        reached = [sum(float(weights[b, j]) for j in true[: place + 1]) >= quota for place in range(len(true))]
        if any(reached):  # only the true top quota counts, with ties
            true = [i for i in true if labels[b, i] >= labels[b, true[reached.index(True)]]]
        if not true or quota >= sum(float(weights[b, i]) for i in valid):
            continue
        low, high = -100.0, 100.0
        for _ in range(200):
            middle = (low + high) / 2
            mass = sum(float(weights[b, i]) * LAWS[law]((float(x[b, i]) - middle) / tau) for i in valid)
            low, high = (middle, high) if mass > quota else (low, middle)
        logs = [(float(weights[b, i]), math.log(LAWS[law]((float(x[b, i]) - low) / tau))) for i in true]
        terms.append(-sum(w * log for w, log in logs) / sum(w for w, _ in logs))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_quota_equals_a_loop(stages: int, law: str) -> None:
    scores, labels, mask = lists(stages, seed=stages, items=12)
    labels = torch.where(labels > 3, labels, 0.0)
    generator = torch.Generator().manual_seed(1)
    weights = torch.where(labels > 0, 1.0, 40 * torch.rand(labels.shape, generator=generator).double())
    weights[0, -1] = 0.0
    taus, quotas = [0.5, 2.0, 7.0][:stages], [9, 6, 4][:stages]
    objective = QuotaObjective(losses.get(law), stages, tau=taus)
    found = objective(scores, labels, mask, quotas=quotas, k=2, item_weights=weights)
    expected = [
        loop(x.detach(), labels, mask, weights, quota, tau, law)
        for x, quota, tau in zip(scores, quotas, taus, strict=True)
    ]
    assert [term.item() for term in found.terms.values()] == pytest.approx(expected, abs=1e-9)
    assert found.total.item() == pytest.approx(sum(expected), abs=1e-9)
    plain = objective(scores, labels, mask, quotas=quotas, k=2)
    ones = torch.ones_like(labels)
    expected = [
        loop(x.detach(), labels, mask, ones, quota, tau, law)
        for x, quota, tau in zip(scores, quotas, taus, strict=True)
    ]
    assert [term.item() for term in plain.terms.values()] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("law", LAWS)
def test_quota_gradient_matches_finite_differences(law: str) -> None:
    scores, labels, mask = lists(2, seed=4)
    weights = 1 + 20 * torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)).double()
    objective = QuotaObjective(losses.get(law, tau=1.5), 2)
    assert torch.autograd.gradcheck(
        lambda *x: objective(x, labels, mask, quotas=[6, 3], k=2, item_weights=weights).total,
        tuple(scores),
        atol=1e-6,
    )


def test_k_of_the_loss_replaces_the_quotas() -> None:
    scores, labels, mask = lists(2, items=12)
    mask[:] = True
    known: dict[str, Any] = {"quotas": [9, 6], "k": 2}
    for k, cut in ((3, 3), (None, None)):
        found = QuotaObjective(losses.get("sigmoid", k=k), 2)(scores, labels, mask, **known)
        ones = torch.ones_like(labels)
        expected = [
            loop(x.detach(), labels, mask, ones, cut or quota, 1.0, "sigmoid")
            for x, quota in zip(scores, (9, 6), strict=True)
        ]
        assert [term.item() for term in found.terms.values()] == pytest.approx(expected, abs=1e-9)
    positives = QuotaObjective(losses.get("sigmoid", k="positives"), 1)
    rows = [
        positives([scores[0][b : b + 1]], labels[b : b + 1], mask[b : b + 1], quotas=[9], k=2).total for b in range(5)
    ]
    counts = [int((labels[b] > 0).sum()) for b in range(5)]
    for b, count in enumerate(counts):
        if count < 12:
            one = slice(b, b + 1)
            wanted = loop(scores[0].detach()[one], labels[one], mask[one], torch.ones(1, 12), count, 1.0, "sigmoid")
            assert rows[b].item() == pytest.approx(wanted, abs=1e-9)


def test_quota_tends_to_the_softmax_over_the_pool_for_small_memberships() -> None:
    scores, labels, mask = lists(1, seed=6, items=12)
    labels = torch.where(labels > 4, labels, 0.0)
    weights = torch.where(labels > 0, 1.0, 5e5).double()
    options: dict[str, Any] = {"quotas": [3], "k": 3, "item_weights": weights}
    slopes = []
    for objective in (
        QuotaObjective(losses.get("sigmoid", tau=5.0), 1),
        IndependentObjective(losses.get("softmax", tau=5.0), 1),
    ):
        (slope,) = torch.autograd.grad(objective(scores, labels, mask, **options).total, scores)
        slopes.append(slope)
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-6, rtol=1e-4)


def test_softmax_over_the_catalogue_pool_is_the_logq_corrected_softmax() -> None:
    data = Tiny(train_negatives=9, negative_source="popularity", logq_correction=True)
    torch.manual_seed(0)
    plain = CascadeModule(data.schema, TWO, losses.get("softmax", tau=3.0), k=3, dim=3)
    torch.manual_seed(0)
    pooled = {"class_path": "recsys_topk.cascades.objectives.independent.IndependentObjective"}
    weighted = CascadeModule(
        data.schema,
        TWO,
        losses.get("softmax", tau=3.0),
        {**pooled, "init_args": {"pool": "catalogue"}},
        k=3,
        dim=3,
    )
    batch = data.add_negatives(next(iter(data.train_dataloader())))
    expected = plain.compute_objective(batch)
    found = weighted.compute_objective(batch)
    torch.testing.assert_close(found.total, expected.total)


@pytest.mark.parametrize("source", ["uniform", "in_batch", "popularity", "shared", {"in_batch": 5, "uniform": 4}])
def test_quota_trains_from_every_source(source: Any) -> None:
    data = Tiny(train_negatives=9, negative_source=source)
    model = CascadeModule(data.schema, TWO, "sigmoid", "quota", k=3, dim=3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    diagnostics = Diagnostics(1)
    trainer = Trainer(**QUIET, max_steps=3, callbacks=[diagnostics, Pace(every=0.0)])
    trainer.fit(model, data)
    mass = trainer.callback_metrics["diagnostics/selection_mass/retrieval"]
    assert float(mass) == pytest.approx(1.0, abs=1e-3)
    assert math.isfinite(float(trainer.callback_metrics["train/loss"]))
    assert any(not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def quota_of(loss: Any = "sigmoid", **options: Any) -> dict[str, Any]:
    return {"loss": loss, "objective": lambda chosen, stages: QuotaObjective(chosen, stages, **options)}


@pytest.mark.parametrize(
    ("model", "data", "text"),
    [
        (quota_of(), {"train_negatives": 0}, "--data.train_negatives 0 draws none; use --data.train_negatives 25"),
        (quota_of(), {"negative_source": "catalogue"}, "--data.negative_source catalogue draws none"),
        (quota_of(), {"logq_correction": True}, "already corrects for the sampling"),
        (quota_of(), {"model": {"hard_negatives": 2}}, "hard negatives are selected by score"),
        (quota_of(pool=0), {}, "passes 12 items on, but .* has 7 items with the logged ones, .* nothing is learned"),
        (
            {"loss": "softmax", "objective": lambda loss, n: IndependentObjective(loss, n, pool="catalogue")},
            {"model": {"stages": [TWO[0], RANKER]}},
            "hard negatives are selected by score",
        ),
    ],
)
def test_pool_without_weights_raises_before_training(model: dict[str, Any], data: dict[str, Any], text: str) -> None:
    more = data.pop("model", {})
    source = Tiny(**{"train_negatives": 9, **data})
    made = CascadeModule(source.schema, dim=3, **{"stages": TWO, "k": 3, **model, **more})
    with pytest.raises(ValueError, match=text):
        Trainer(**QUIET, max_steps=1).fit(made, source)


def test_batch_without_probabilities_raises() -> None:
    data = Tiny(train_negatives=9, negative_source="uniform")
    model = CascadeModule(data.schema, TWO, "sigmoid", "quota", k=3, dim=3)
    with pytest.raises(ValueError, match="no sampled negatives with sampling probabilities"):
        model.compute_objective(data.add_negatives(next(iter(data.train_dataloader()))))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: QuotaObjective(losses.get("dftopk"), 2), "sums to k, but that of 'dftopk' does not; use --loss"),
        (lambda: QuotaObjective(losses.get("softmax"), 2), "needs a loss with a top-k operator"),
        (lambda: QuotaObjective(losses.get("sigmoid"), 2, tau=[1.0]), "one number per stage, 2 in all"),
        (lambda: QuotaObjective(losses.get("sigmoid"), 2, tau=[1.0, 0.0]), "tau must be a positive"),
        (lambda: QuotaObjective(losses.get("sigmoid"), 2, pool=-1), "pool, if it is not 'catalogue', must be"),
        (lambda: IndependentObjective(losses.get("arf"), 2, pool=5), "'arf' does not support item_weights"),
    ],
)
def test_wrong_options_raise(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_quota_is_restored_from_its_description() -> None:
    data = Tiny(train_negatives=9)
    first = CascadeModule(data.schema, TWO, "lapsum", lambda loss, n: QuotaObjective(loss, n, pool=70, tau=[2.0, 9.0]))
    second = CascadeModule(**first.hparams)
    made: CascadeObjective = second.objective
    assert isinstance(made, QuotaObjective)
    assert made.pool == 70
    assert made.taus == (2.0, 9.0)
    assert registry.resolve("quota") is QuotaObjective
