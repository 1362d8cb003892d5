"""The rules for all losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.testing.comparison import LOOSE, gradient_of, require, require_finite, require_same, rules_for
from recsys_topk.testing.lists import Lists, ordinary, ragged, tied
from recsys_topk.testing.shared_rules import FunctionSubject, Result, require_stored


class LossSubject(FunctionSubject):
    """A loss under test: a loss class, a function without arguments that returns a loss, or a loss."""

    measured = {"reduction": "none"}  # noqa: RUF012

    def __init__(self, target: type[RankingLoss] | Callable[[], RankingLoss] | RankingLoss) -> None:
        super().__init__(target if isinstance(target, RankingLoss) else target())
        self.exact_gradient = getattr(self.template, "exact_gradient", True)
        operator = self.template.operator
        if operator is not None:
            for name in ("deterministic", "equivariant", "tie_fair", "transformable"):
                setattr(self, name, getattr(operator, name))
            self.exact_gradient = self.exact_gradient and operator.exact_gradient
            self.compiles_unmasked = False

    def cuts(self, lists: Lists) -> list[int | None]:
        """Return the values of k to test: None only for losses that do not require k."""
        return [lists.k] if self.template.requires_k else [None, lists.k]

    def forms(self, lists: Lists) -> list[tuple[bool, int | Tensor | None, dict[str, Any]]]:
        """See `Subject.forms`."""
        each = torch.zeros(len(lists.scores), dtype=torch.int64, device=lists.scores.device)
        masked: list[tuple[bool, int | Tensor | None, dict[str, Any]]] = [(True, lists.k, {}), (True, each, {})]
        return [*((False, k, {"k": None}) for k in self.cuts(lists)), *masked, (True, None, {"k": "positives"})]

    def values(
        self, built: Any, scores: Sequence[Tensor], lists: Lists, mask: Tensor | None, k: int | Tensor | None
    ) -> dict[str, Tensor]:
        """See `Subject.values`."""
        return {"loss": built(scores[0], lists.labels, mask, k=k)}

    def check(self, result: Result, given: object) -> None:
        """Raise unless loss and gradient are finite and the loss is not negative."""
        super().check(result, given)
        value = result.values["loss"]
        require(bool((value >= -1e-6).all()), f"the loss is negative: {value.tolist()}", given)

    def __call__(
        self, lists: Lists, k: int | Tensor | None, reduction: str = "none", weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of its sum."""
        scores = lists.scores.clone().requires_grad_()
        value = self.build(reduction=reduction)(scores, lists.labels, lists.mask, k=k, weights=weights)
        return value.detach(), gradient_of(value, scores)[0]


def lists_without_positives_are_skipped(subject: LossSubject, lists: Lists) -> None:
    """Lists without a valid item or without a positive are skipped. Alone they give 0 with zero gradients."""
    n = lists.scores.shape[1]
    none_valid = (torch.full((1, n), math.nan), torch.full((1, n), 5.0), torch.zeros(1, n, dtype=torch.bool))
    low = min(0.0, subject.template.positive_above)
    no_positive = (torch.linspace(-1, 1, n)[None], torch.full((1, n), low), torch.ones(1, n, dtype=torch.bool))
    for k in subject.cuts(lists):
        value, gradient = subject(lists, k, "mean")
        for extra in (none_valid, no_positive):
            more = lists.and_rows(*extra)
            with_extra, with_extra_gradient = subject(more, k, "mean")
            require_finite(with_extra, "the mean", more)
            require(bool((with_extra_gradient[-1] == 0).all()), "a skipped list got a gradient", more)
            if subject.deterministic:
                require_same(with_extra, value, "a list without positives changed the mean", more)
                require_same(with_extra_gradient[:-1], gradient, "a list without positives changed the gradient", more)
            alone = more.rows(torch.tensor([len(more.scores) - 1]))
            skipped, skipped_gradient = subject(alone, k, "mean")
            require(float(skipped) == 0.0, f"a batch without positives gave {float(skipped)} instead of 0", alone)
            require(bool((skipped_gradient == 0).all()), "a batch without positives gave a gradient", alone)


def k_can_be_given_per_list(subject: LossSubject, lists: Lists) -> None:
    """One int and the same int per list give the same result. k = 0 and k >= the number of items do not raise."""
    ks = [lists.k] if not subject.deterministic else [lists.k, 0, lists.scores.shape[1], lists.scores.shape[1] + 5]
    for k in ks:
        value, gradient = subject(lists, k)
        require_finite(value, f"the loss at k = {k}", lists)
        require_finite(gradient, f"the gradient at k = {k}", lists)
        if subject.deterministic:
            each, each_gradient = subject(lists, torch.full((len(lists.scores),), k))
            require_same(each, value, f"k = {k} as a tensor changed the loss", lists)
            require_same(each_gradient, gradient, f"k = {k} as a tensor changed the gradient", lists)
        if subject.template.requires_k and (k == 0 or k >= lists.scores.shape[1]):
            require(bool((value == 0).all()), f"k = {k} selects no or all items, but the loss is not 0", lists)


def the_same_input_gives_the_same_loss(subject: LossSubject, lists: Lists) -> None:
    """Two calls give identical results, and equal items get equal gradients."""
    if not subject.deterministic:
        return
    for k in subject.cuts(lists):
        (value, gradient), (again, gradient_again) = subject(lists, k), subject(lists, k)
        require(torch.equal(value, again) and torch.equal(gradient, gradient_again), "two calls differ", lists)
        if not subject.tie_fair:
            continue
        equal = lists.scores[:, :, None] == lists.scores[:, None, :]
        equal &= lists.labels[:, :, None] == lists.labels[:, None, :]
        equal &= lists.mask[:, :, None] & lists.mask[:, None, :]
        apart = (gradient[:, :, None] - gradient[:, None, :]).abs()
        worst = float(torch.where(equal, apart, 0.0).max()) if apart.numel() else 0.0
        scale = max(1.0, float(gradient.abs().max())) if gradient.numel() else 1.0
        require(worst <= 1e-9 * scale, f"equal items got gradients {worst:.3g} apart", lists)


def flat_lists_equal_rows(subject: LossSubject, lists: Lists) -> None:
    """1-D tensors with `lengths`, or with `list_ids` in any order, give the loss and gradient of the rows."""
    if not subject.deterministic:
        return
    weights, rows = torch.arange(1.0, 1.0 + len(lists.scores)), lists.mask.any(-1)
    for k in subject.cuts(lists):
        loss = subject.build(reduction="none")
        x = lists.scores.clone().requires_grad_()
        expected = loss(x, lists.labels, lists.mask, k=k, weights=weights)
        slope = gradient_of(expected, x)[0]
        each = None if k is None else torch.full((len(lists.scores),), k)
        by_length = loss(x[lists.mask], lists.labels[lists.mask], lengths=lists.mask.sum(-1), k=each, weights=weights)
        require_same(by_length, expected, "lengths changed the loss", lists)
        require_same(gradient_of(by_length, x)[0], slope, "lengths changed the gradient", lists)
        # Items in another order. A list without items has no id.
        across = lists.mask.T
        ids = torch.arange(len(lists.scores)).expand_as(across)[across] * 7 - 3
        by_id = loss(x.T[across], lists.labels.T[across], list_ids=ids, k=k, weights=weights[rows])
        require_same(by_id, expected[rows], "list_ids changed the loss", lists)
        require_same(gradient_of(by_id, x)[0], slope, "list_ids changed the gradient", lists)


def losses_are_finite_and_not_negative(subject: LossSubject, lists: Lists) -> None:
    """Value and gradient are finite for finite scores. The value is not negative (learned weights would diverge)."""
    for k in subject.cuts(lists):
        subject.check(subject.measure(lists, k), lists)


def item_weights_count_copies(subject: LossSubject) -> None:
    """An item of weight 2 equals two copies, and one of weight 0 a masked item, as rows and as flat lists.

    A loss that declares takes_item_weights = False raises a ValueError.
    """
    for lists in (ordinary(), ragged()):
        weights = torch.tensor([[1, 2, 1, 0, 3, 1, 2], [2, 1, 1, 2, 0, 1, 3], [1, 1, 2, 1, 2, 3, 0]]).double()
        for k in subject.cuts(lists):
            loss, scores = subject.build(reduction="none"), lists.scores.clone().requires_grad_()
            if not loss.takes_item_weights:
                try:
                    loss(scores, lists.labels, lists.mask, k=k, item_weights=weights)
                except ValueError:
                    continue
                require(False, "takes_item_weights = False is declared, but item_weights are accepted", lists)
            value = loss(scores, lists.labels, lists.mask, k=k, item_weights=weights)
            gradient = gradient_of(value, scores)[0]
            flat = [x[lists.mask] for x in (scores, lists.labels, weights)]
            again = loss(*flat[:2], k=k, item_weights=flat[2], lengths=lists.mask.sum(1))
            require_same(again, value, "item_weights of flat lists give another loss than those of rows", lists)
            for row in range(len(scores)):
                copies, columns = lists.copies(weights, row)
                expected, slope = subject(copies, k)
                summed = torch.zeros_like(gradient[row]).index_add(0, columns, slope[0])
                require_same(value[row], expected[0], "weights differ from copies", lists, 1e-6)
                require_same(gradient[row], summed, "the gradient of weights differs from that of copies", lists, 1e-6)


def labels_get_no_gradient(subject: LossSubject) -> None:
    """Labels that require a gradient do not change the loss and get none, as rows and as flat lists."""
    for dtype in (torch.float32, torch.float64):
        lists = ragged().to(dtype)
        for k in subject.cuts(lists):
            labels = lists.labels.to(dtype).requires_grad_()
            scores, mask = lists.scores.clone().requires_grad_(), lists.mask
            each = None if k is None else torch.full((len(scores),), k)
            loss = subject.build(reduction="none")
            flat = {"lengths": mask.sum(-1), "k": each}
            for value in (loss(scores, labels, mask, k=k), loss(scores[mask], labels[mask], **flat)):
                if subject.deterministic:
                    require_same(value, subject(lists, k)[0], "labels with a gradient changed the loss", lists, LOOSE)
                (found,) = torch.autograd.grad(value.sum(), labels, allow_unused=True)
                require(found is None, "labels got a gradient", lists)


def weights_and_reductions_agree(subject: LossSubject) -> None:
    """The mean is sum(w L) / sum(w), the sum is sum(w L). Without a mask all items are real."""
    if not subject.deterministic:
        return
    lists, weights = ordinary(), torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    for k in subject.cuts(lists):
        each = subject(lists, k)[0]
        require_same(subject(lists, k, "mean")[0], each.mean(), "mean is not the mean of the lists", lists)
        require_same(subject(lists, k, "sum")[0], each.sum(), "sum is not the sum over lists", lists)
        total = (weights * each).sum()
        require_same(subject(lists, k, "mean", weights)[0], total / weights.sum(), "weighted mean", lists)
        require_same(subject(lists, k, "sum", weights)[0], total, "weighted sum", lists)
        require_same(subject(lists, k, "none", weights)[0], weights * each, "weights under reduction none", lists)
        unmasked = subject.build(reduction="none")(lists.scores, lists.labels, k=k)
        require_same(unmasked, each, "mask=None differs from a mask that is all True", lists)


def losses_can_be_stored(subject: LossSubject) -> None:
    """Pickle and state_dict restore a loss that gives the same values."""
    require_stored(subject)


def empty_batches_give_zero(subject: LossSubject) -> None:
    """Batches without lists, without items, or with one item per list give 0 or a finite value and do not raise."""
    for lists, n in ((0, 5), (2, 0), (2, 1)):
        scores = torch.zeros(lists, n, requires_grad=True)
        labels, mask = torch.ones(lists, n), torch.ones(lists, n, dtype=torch.bool)
        given = Lists(scores, labels, mask, k=1)
        for k in subject.cuts(given):
            value = subject.build(reduction="mean")(scores, labels, mask, k=k)
            require_finite(value, "the mean", given)
            require(n > 0 or value.item() == 0.0, f"a batch without items gave {value.item()}", given)
            gradient_of(value, scores)


ON_LISTS, ONCE = rules_for(LossSubject, "recsys_topk.testing.shared_rules", __name__)
LISTS = (ordinary, ragged, tied)
