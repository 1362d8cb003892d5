"""What the operator and loss suites time: one forward and backward pass, with neither model nor data around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recsys_topk import losses, operators
from recsys_topk.bench.timing import Pass, Shape
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.cascades.objectives.quota import QuotaObjective
from recsys_topk.losses.topk import TopKLoss, selection_bce

GIGABYTE = 2**30
OBJECTIVES = ("-joint", "-quota")

# binary: k positives per list. graded: labels 0 to 4. k: graded, with a cut-off of k. ties: graded, scores are
# multiples of 1/8. bf16: graded, with bfloat16 scores. weights and graded-weights: with item weights.
DATA = ("binary", "graded", "k", "ties", "bf16", "weights", "graded-weights")

TARGET_SHAPE = "1024x200x10"
# Ratios to plain binary cross-entropy at this shape on one thread. With item weights: 1.2 times the ratio without.
TARGETS = {
    "lambdaloss-graded": 40, "lambdarank-graded": 30, "ranknet-graded": 20, "approx_ndcg": 10, "approx_ndcg-graded": 60,
    "approx_ndcg-k": 60, "listmle": 6, "sinkhorn": 10, "softsort": 30, "diffsort": 200, "perturbed": 200,
    "neuralsort": 250, "arf-graded": 1000, "neural_ndcg-graded": 3000,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Something to time: a registered name with arguments, under its own label."""

    label: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "operators": [
        Subject("softsort-plain", "softsort", {"normalised": False}),
        Subject("neuralsort-plain", "neuralsort", {"normalised": False}),
        Subject("diffsort-odd-even", "diffsort", {"network": "odd_even"}),
    ],
    "losses": [
        Subject("diffsort-odd-even", "diffsort", {"network": "odd_even"}),
        Subject("dftopk-masked", "dftopk"),
        Subject("dftopk-joint", "dftopk"),
        Subject("sparse-joint", "sparse"),
        Subject("sigmoid-quota", "sigmoid"),
    ],
}


def subjects(suite: str) -> dict[str, Subject]:
    """Return what a suite can time, by label."""
    names = operators.available() if suite == "operators" else losses.available()
    found = [*(Subject(name, name) for name in names), *FORMS[suite]]
    return {subject.label: subject for subject in sorted(found, key=lambda subject: subject.label)}


@dataclass(frozen=True)
class Batch:
    """Random scores and labels (see `DATA`), and, for masked steps, a mask and one k per list.

    Attributes:
        scores: (B, N).
        labels: (B, N).
        mask: Boolean (B, N).
        ks: (B,).
        plain: Scores of the baseline, float32.
        k: Cut-off of losses that can do without one.
        items: Weights of the items, (B, N).
        model: Computes the scores in every pass; None: they are given.
    """

    scores: Tensor
    labels: Tensor
    mask: Tensor
    ks: Tensor
    plain: Tensor
    k: int | None = None
    items: Tensor | None = None
    model: SmallTwoTower | None = None

    @classmethod
    def of(cls, shape: Shape, device: str, data: str = "binary", model: bool = False) -> Batch:
        """Draw a batch from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(shape.lists, shape.items, generator=generator)
        labels = torch.zeros(shape.lists, shape.items)
        labels[:, : shape.k] = 1.0
        mask = torch.rand(shape.lists, shape.items, generator=generator) > 0.2
        mask[:, :2] = True
        ks = torch.randint(1, shape.k + 1, (shape.lists,), generator=generator)
        plain = scores.clone().to(device).requires_grad_()
        if data not in ("binary", "weights"):
            labels = torch.randint(0, 5, scores.shape, generator=generator).float()
        if data == "ties":
            scores = (8.0 * scores).round() / 8.0
        elif data == "bf16":
            scores = scores.bfloat16()
        tower = SmallTwoTower(shape, device).to(device) if model else None
        items = torch.exp(torch.randn(scores.shape, generator=generator)).to(device) if "weights" in data else None
        labels, mask, ks, k = labels.to(device), mask.to(device), ks.to(device), shape.k if data == "k" else None
        return cls(scores.to(device).requires_grad_(), labels, mask, ks, plain, k, items, tower)


class SmallTwoTower(nn.Module):
    """The model in the runtime protocol of the paper: 13 tables of 100 rows, towers 128 -> 64 -> 32, a dot product."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.shapes = ((shape.lists, 8), (shape.lists, 50, 5), (shape.lists, shape.items, 8))
        self.device = device
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(100, 8) for _ in range(13))
        self.user, self.item = (
            nn.Sequential(nn.Linear(8 * tables, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32))
            for tables in (13, 8)
        )

    def forward(self) -> Tensor:
        """Draw random ids of requests, histories of 50 views and items, and return the scores, (B, N)."""
        request, views, items = (torch.randint(100, shape).to(self.device) for shape in self.shapes)
        history = self._embed(views, range(8, 13)).mean(1)
        users = self.user(torch.cat([self._embed(request, range(8)), history], -1))
        vectors = self.item(self._embed(items, (*range(8, 13), 0, 1, 2)))
        scores: Tensor = torch.bmm(vectors, users[:, :, None]).squeeze(-1)
        return scores

    def _embed(self, ids: Tensor, tables: Iterable[int]) -> Tensor:
        return torch.cat([self.tables[table](ids[..., column]) for column, table in enumerate(tables)], -1)


def takes_weights(subject: Subject) -> bool:
    """Return whether a loss is timed with item weights."""
    return subject.label == subject.name and losses.registry.resolve(subject.name).takes_item_weights


def one_pass(suite: str, subject: Subject, shape: Shape, batch: Batch) -> Pass:
    """Return one forward and backward pass of a subject.

    An operator is timed with the cross-entropy of its membership, since something has to be differentiated.
    """
    if suite == "operators":
        operator = operators.get(subject.name, **subject.arguments)
        return _backward(batch, lambda scores: selection_bce(operator(scores, shape.k), batch.labels).mean())
    cls = losses.registry.resolve(subject.name)
    loss = losses.get(subject.name, k=shape.k if cls.requires_k else batch.k, **subject.arguments)
    if subject.label.endswith(OBJECTIVES):
        quota = subject.label.endswith("-quota")
        objective, quotas = (QuotaObjective if quota else JointObjective)(loss, 2), (shape.k, shape.k)
        second = batch.scores.detach().flip(1).requires_grad_()
        known: dict[str, Any] = {"quotas": quotas, "k": shape.k}
        known["item_weights"] = torch.where(batch.labels > 0, 1.0, 100.0) if quota else None
        return _backward(batch, lambda scores: objective([scores, second], batch.labels, **known).total)
    if subject.label.endswith("-masked"):
        return _backward(batch, lambda scores: loss(scores, batch.labels, batch.mask, k=batch.ks))
    return _backward(batch, lambda scores: loss(scores, batch.labels, item_weights=batch.items))


def baseline(batch: Batch, label: str = "") -> Pass:
    """Return a pass of plain binary cross-entropy on the same batch; one for each of the two stages of an objective."""
    plain = replace(batch, scores=batch.plain)
    once = _backward(plain, lambda scores: F.binary_cross_entropy_with_logits(scores, plain.labels))
    return (lambda: (once(), once())) if label.endswith(OBJECTIVES) else once


def _backward(batch: Batch, value: Callable[[Tensor], Tensor]) -> Pass:
    def run() -> None:
        batch.scores.grad = None
        if batch.model is not None:
            batch.model.zero_grad()
        value(batch.scores if batch.model is None else batch.model()).backward()  # type: ignore[no-untyped-call]

    return run


def too_big(suite: str, subject: Subject, shape: Shape) -> str | None:
    """Return why a combination is not run, or None: it would need gigabytes, or minutes."""
    entries = shape.lists * shape.items
    name = subject.name
    if name == "diffsort":
        width = 1 << (shape.items - 1).bit_length()
        bitonic = subject.arguments.get("network") != "odd_even"
        layers = width.bit_length() * (width.bit_length() - 1) // 2 if bitonic else shape.items
        needed = 40 * shape.lists * (width if bitonic else shape.items) * layers
        return f"{needed / GIGABYTE:.0f} GB of layers" if needed > 4 * GIGABYTE else None
    if name == "neuralsort":
        rows = shape.k if subject.arguments.get("normalised") is False else shape.items
        return f"{entries * rows:.1e} entries of the relaxed permutation" if entries * rows > 5e8 else None
    cost = operators.registry.resolve(name).cost if suite == "operators" else losses.registry.resolve(name).cost
    quadratic = cost == "n^2" and not (suite == "losses" and issubclass(losses.registry.resolve(name), TopKLoss))
    if quadratic and entries * shape.items > 1e8:
        return f"{entries * shape.items:.1e} pairs of items"
    if name == "perturbed" and entries > 1e6 - 1:
        return "64 noised copies of a million items"
    return None
