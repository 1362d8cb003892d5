"""The rules for all cascade objectives. They use only the interface of an objective."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recsys_topk.testing.comparison import LOOSE, gradient_of, require, require_finite, require_same
from recsys_topk.testing.host_reads import DEVICE, no_host_reads
from recsys_topk.testing.lists import Lists, extreme, ordinary, ragged


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


class ObjectiveSubject:
    """An objective under test.

    Args:
        make: A function without arguments that returns the objective.
        stages: Number of stages of the objective.
        groups: Number of sample groups, best first; the label of an item determines its group.
        deterministic: Whether the same input gives the same output.
    """

    def __init__(self, make: Callable[[], Objective], stages: int, groups: int, deterministic: bool) -> None:
        self.template = make()
        self.name = type(self.template).__name__
        self.stages = stages
        self.groups = groups
        self.deterministic = deterministic

    def inputs(self, lists: Lists) -> list[Tensor]:
        """Return the scores of each stage: those of the lists for the first stage, multiples of them for the others."""
        factors = [1.0, -0.5, 0.75, 1.25][: self.stages]
        return [(lists.scores * f).clone().requires_grad_() for f in factors]

    def quotas(self, lists: Lists) -> list[int]:
        """Return quotas that decrease by 1 per stage and end at k + 1."""
        return [lists.k + self.stages - stage for stage in range(self.stages)]

    def group(self, lists: Lists) -> Tensor:
        """Return the sample group of each item: a larger label gives a better group; -1 for padding."""
        best = (self.groups - 1 - lists.labels).clamp(0, self.groups - 1).long()
        return torch.where(lists.mask, best, -1)

    def __call__(self, lists: Lists) -> tuple[Tensor, list[Tensor]]:
        """Return the total and its gradient with respect to the scores of each stage."""
        scores = self.inputs(lists)
        total = self.output(lists, scores).total
        return total.detach(), gradient_of(total, *scores)

    def output(self, lists: Lists, scores: Sequence[Tensor]) -> Output:
        """Return the result of the objective."""
        objective = copy.deepcopy(self.template)
        group, quotas = self.group(lists), self.quotas(lists)
        return objective(scores, lists.labels, lists.mask, groups=group, quotas=quotas, k=lists.k)


def the_output_is_a_scalar_with_named_terms(subject: ObjectiveSubject, lists: Lists) -> None:
    """The total is a finite scalar, terms are finite scalars by name, and every stage gets a finite gradient."""
    scores = subject.inputs(lists)
    output = subject.output(lists, scores)
    require(output.total.dim() == 0, f"total has shape {tuple(output.total.shape)}", lists)
    require_finite(output.total, "the total", lists)
    require(len(output.terms) > 0, "there are no terms", lists)
    for name, term in output.terms.items():
        require(term.dim() == 0, f"term {name!r} has shape {tuple(term.shape)}", lists)
        require_finite(term, f"term {name!r}", lists)
    for stage, gradient in enumerate(gradient_of(output.total, *scores)):
        require_finite(gradient, f"the gradient of stage {stage}", lists)
        require(bool((gradient != 0).any()), f"stage {stage} gets no gradient", lists)


def masked_items_have_no_effect(subject: ObjectiveSubject, lists: Lists) -> None:
    """Masked items of any value change neither the total nor a gradient, and get no gradient."""
    wide, where = lists.with_junk()
    (total, gradients), (padded, padded_gradients) = subject(lists), subject(wide)
    for stage, (gradient, outer) in enumerate(zip(gradients, padded_gradients, strict=True)):
        require(bool((gradient[~lists.mask] == 0).all()), f"a masked item of stage {stage} got a gradient", lists)
        require(bool((outer[~wide.mask] == 0).all()), f"a masked item of stage {stage} got a gradient", wide)
        if subject.deterministic:
            require_same(outer[:, where], gradient, f"masked items changed the gradient of stage {stage}", wide)
    if subject.deterministic:
        require_same(padded, total, "masked items changed the total", wide)


def order_of_items_does_not_matter(subject: ObjectiveSubject, lists: Lists) -> None:
    """Permuting the items of a list in all stages does not change the total, and permutes the gradients."""
    if not subject.deterministic:
        return
    other, order = lists.shuffled()
    (total, gradients), (shuffled, shuffled_gradients) = subject(lists), subject(other)
    require_same(shuffled, total, "permuting the items changed the total", lists)
    for stage, (gradient, moved) in enumerate(zip(gradients, shuffled_gradients, strict=True)):
        require_same(moved, gradient[:, order], f"permuting the items changed the gradient of stage {stage}", lists)


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


def inputs_are_not_modified(subject: ObjectiveSubject, lists: Lists) -> None:
    """Neither the forward nor the backward pass modifies its inputs."""
    scores = subject.inputs(lists)
    before = [x.detach().clone() for x in scores]
    labels, mask = lists.labels.clone(), lists.mask.clone()
    gradient_of(subject.output(lists, scores).total, *scores)
    same = all(torch.equal(x.detach(), y) for x, y in zip(scores, before, strict=True))
    same = same and torch.equal(labels, lists.labels) and torch.equal(mask, lists.mask)
    require(same, "the call changed its input", lists)


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
        total = subject.output(lists, subject.inputs(lists)).total
        if subject.deterministic:
            require_same(total, subject(plain)[0], "labels that require a gradient changed the total", lists, LOOSE)
        (found,) = torch.autograd.grad(total, lists.labels, allow_unused=True)
        require(found is None, "labels got a gradient", lists)


def half_precision_is_computed_in_float32(subject: ObjectiveSubject) -> None:
    """bfloat16 and autocast give the float32 result in float32."""
    half = ragged().to(torch.bfloat16)
    total, gradients = subject(half)
    with torch.autocast(half.scores.device.type, dtype=torch.bfloat16):
        cast, _ = subject(half)
    for result in (total, cast):
        require(result.dtype == torch.float32, f"bfloat16 scores gave a total of {result.dtype}", half)
    for stage, gradient in enumerate(gradients):
        require_finite(gradient, f"the gradient of stage {stage}", half)
    if subject.deterministic:
        exact, _ = subject(half.to(torch.float32))
        require_same(total, exact, "bfloat16 scores were not computed in float32", half, 1e-2)
        require_same(cast, total, "autocast changed the total", half, LOOSE)


def large_scores_give_finite_results(subject: ObjectiveSubject) -> None:
    """Scores of 1e4, far from 0 or very close together, give finite totals and gradients (1e30 has no square)."""
    for lists in extreme((1e4,)):
        total, gradients = subject(lists)
        require_finite(total, "the total", lists)
        for stage, gradient in enumerate(gradients):
            require_finite(gradient, f"the gradient of stage {stage}", lists)


def objectives_can_be_stored(subject: ObjectiveSubject) -> None:
    """Pickle restores an objective that gives the same total."""
    lists = ordinary()
    expected, _ = subject(lists)
    original = subject.template
    try:
        subject.template = pickle.loads(pickle.dumps(original))
        value, _ = subject(lists)
    finally:
        subject.template = original
    if subject.deterministic:
        require_same(value, expected, "the pickled objective gives a different total", lists)


def no_values_are_read_on_the_host(subject: ObjectiveSubject) -> None:
    """On devices other than the CPU neither pass waits for the device, with and without a mask."""
    lists, objective = ragged(), copy.deepcopy(subject.template)
    if isinstance(objective, nn.Module):
        objective.to(DEVICE)
    scores = [x.detach().float().to(DEVICE).requires_grad_() for x in subject.inputs(lists)]
    labels, group = lists.labels.float().to(DEVICE), subject.group(lists).to(DEVICE)
    for mask in (None, lists.mask.to(DEVICE)):
        with no_host_reads():
            output = objective(scores, labels, mask, groups=group, quotas=subject.quotas(lists), k=lists.k)
            gradient_of(output.total, *scores)


ON_LISTS: tuple[Callable[[ObjectiveSubject, Lists], None], ...] = (
    the_output_is_a_scalar_with_named_terms,
    masked_items_have_no_effect,
    order_of_items_does_not_matter,
    lists_without_items_are_skipped,
    inputs_are_not_modified,
)
ONCE: tuple[Callable[[ObjectiveSubject], None], ...] = (
    item_weights_count_copies,
    labels_get_no_gradient,
    half_precision_is_computed_in_float32,
    large_scores_give_finite_results,
    no_values_are_read_on_the_host,
    objectives_can_be_stored,
)
LISTS: tuple[Callable[[], Lists], ...] = (ordinary, ragged)
