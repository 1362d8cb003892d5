"""The rules for all cascade objectives. They use only the interface of an objective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from recsys_topk.testing.comparison import LOOSE, gradient_of, require, require_finite, require_same, rules_for
from recsys_topk.testing.lists import Lists, ordinary, ragged
from recsys_topk.testing.shared_rules import Subject, require_stored


class Output(Protocol):
    """The result of an objective."""

    @property
    def total(self) -> Tensor:
        """The scalar to minimise."""

    @property
    def terms(self) -> dict[str, Tensor]:
        """The terms, by name."""


class Objective(Protocol):
    """The call interface of an objective; see `recsys_topk.cascades.objectives`."""

    def __call__(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        groups: Tensor | None = None,
        quotas: Sequence[int],
        k: int,
        **options: Any,
    ) -> Output:
        """Return the objective of a batch of lists."""


class ObjectiveSubject(Subject):
    """An objective under test, with a number of stages and of sample groups. An item's label determines its group."""

    sizes = (1e4,)  # 1e30 has no square

    def __init__(self, make: Callable[[], Objective], stages: int, groups: int, deterministic: bool) -> None:
        super().__init__(make())
        self.stages, self.groups, self.deterministic = stages, groups, deterministic

    def inputs(self, lists: Lists) -> list[Tensor]:
        """Return the scores of each stage: those of the lists for the first stage, multiples of them for the others."""
        factors = [1.0, -0.5, 0.25, 2.0][: self.stages]  # exact in half precision
        return [(lists.scores * f).detach().requires_grad_() for f in factors]

    def quotas(self, lists: Lists) -> list[int]:
        """Return quotas that decrease by 1 per stage and end at k + 1."""
        return [lists.k + self.stages - stage for stage in range(self.stages)]

    def values(
        self, built: Any, scores: Sequence[Tensor], lists: Lists, mask: Tensor | None, k: int | Tensor | None
    ) -> dict[str, Tensor]:
        """See `Subject.values`. A larger label gives a better sample group; padding has group -1."""
        best = (self.groups - 1 - lists.labels).clamp(0, self.groups - 1).long()
        group = torch.where(lists.mask, best, -1)
        output: Output = built(scores, lists.labels, mask, groups=group, quotas=self.quotas(lists), k=k)
        return {"total": output.total, **{f"term {name!r}": term for name, term in output.terms.items()}}

    def __call__(self, lists: Lists) -> tuple[Tensor, list[Tensor]]:
        """Return the total and its gradient with respect to the scores of each stage."""
        result = self.measure(lists, lists.k)
        return result.values["total"], result.gradients


def the_output_is_a_scalar_with_named_terms(subject: ObjectiveSubject, lists: Lists) -> None:
    """The total is a finite scalar, terms are finite scalars by name, and every stage gets a finite gradient."""
    result = subject.measure(lists, lists.k)
    require(len(result.values) > 1, "there are no terms", lists)
    for name, value in result.values.items():
        require(value.dim() == 0, f"{name} has shape {tuple(value.shape)}", lists)
    subject.check(result, lists)
    for stage, gradient in enumerate(result.gradients):
        require(bool((gradient != 0).any()), f"stage {stage} gets no gradient", lists)


def lists_without_items_are_skipped(subject: ObjectiveSubject, lists: Lists) -> None:
    """Lists without a valid item are skipped. A batch of only such lists has a finite total and no gradient."""
    n = lists.scores.shape[1]
    more = lists.and_rows(torch.full((1, n), torch.nan), torch.full((1, n), 5.0), torch.zeros(1, n, dtype=torch.bool))
    (total, gradients), (with_extra, extra_gradients) = subject(lists), subject(more)
    if subject.deterministic:
        require_same(with_extra, total, "a list without items changed the total", more)
    alone = more.rows(torch.tensor([len(more.scores) - 1]))
    empty, empty_gradients = subject(alone)
    require_finite(empty, "the total of a batch without items", alone)
    for stage in range(subject.stages):
        if subject.deterministic:
            got = extra_gradients[stage][:-1]
            require_same(got, gradients[stage], f"a list without items changed the gradient of stage {stage}", more)
        require(bool((extra_gradients[stage][-1] == 0).all()), "a list without items got a gradient", more)
        require(bool((empty_gradients[stage] == 0).all()), "a batch without items got a gradient", alone)


def item_weights_count_copies(subject: ObjectiveSubject) -> None:
    """An item of weight 2 equals two copies, and one of weight 0 a masked item, if the objective takes item weights."""
    loss = getattr(subject.template, "loss", None)
    if not (getattr(subject.template, "takes_item_weights", False) and getattr(loss, "takes_item_weights", False)):
        return
    lists, objective = ragged(), copy.deepcopy(subject.template)
    weights = torch.tensor([[1, 2, 1, 0, 3, 1, 2], [2, 1, 1, 2, 0, 1, 3], [1, 1, 2, 1, 2, 3, 0]]).double()
    for row in range(len(weights)):
        alone, (copies, columns) = lists.rows(torch.tensor([row])), lists.copies(weights, row)
        options: dict[str, Any] = {"quotas": subject.quotas(lists), "k": lists.k}
        first, second = subject.inputs(alone), subject.inputs(copies)
        found = objective(first, alone.labels, alone.mask, item_weights=weights[row : row + 1], **options).total
        expected = objective(second, copies.labels, copies.mask, **options).total
        require_same(found, expected, "weights differ from copies", alone, 1e-6)
        slopes = zip(gradient_of(found, *first), gradient_of(expected, *second), strict=True)
        for slope, of_copies in slopes:
            summed = torch.zeros_like(slope[0]).index_add(0, columns, of_copies[0])
            require_same(slope[0], summed, "the gradient of weights differs from that of copies", alone, 1e-6)


def labels_get_no_gradient(subject: ObjectiveSubject) -> None:
    """Labels that require a gradient do not change the total and get none."""
    for dtype in (torch.float32, torch.float64):
        plain = ragged().to(dtype)
        lists = replace(plain, labels=plain.labels.to(dtype).requires_grad_())
        total = subject.values(subject.build(), subject.inputs(lists), lists, lists.mask, lists.k)["total"]
        if subject.deterministic:
            require_same(total, subject(plain)[0], "labels that require a gradient changed the total", lists, LOOSE)
        (found,) = torch.autograd.grad(total, lists.labels, allow_unused=True)
        require(found is None, "labels got a gradient", lists)


def objectives_can_be_stored(subject: ObjectiveSubject) -> None:
    """Pickle restores an objective that gives the same total."""
    require_stored(subject)


ON_LISTS, ONCE = rules_for(ObjectiveSubject, "recsys_topk.testing.shared_rules", __name__)
LISTS = (ordinary, ragged)
