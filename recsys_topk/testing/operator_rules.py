"""The rules for all operators. Some apply only if the operator declares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.operators.score_scale import BATCHES
from recsys_topk.options import options_of
from recsys_topk.testing.comparison import LOOSE, gradient_of, require, require_finite, require_same, rules_for
from recsys_topk.testing.lists import Lists, ordinary, ragged, tied
from recsys_topk.testing.shared_rules import FunctionSubject, Result, require_stored


class OperatorSubject(FunctionSubject):
    """An operator under test: an operator class, a function without arguments that returns one, or an operator."""

    def __init__(self, target: type[TopKOperator] | Callable[[], TopKOperator] | TopKOperator) -> None:
        super().__init__(target if isinstance(target, TopKOperator) else target())
        for name in ("deterministic", "equivariant", "tie_fair", "exact_gradient", "transformable"):
            setattr(self, name, getattr(self.template, name))

    def forms(self, lists: Lists) -> list[tuple[bool, int | Tensor | None, dict[str, Any]]]:
        """See `Subject.forms`."""
        each = torch.zeros(len(lists.scores), dtype=torch.int64, device=lists.scores.device)
        per_list = [each, each.float()] if self.template.fractional_k else [each]
        return [*super().forms(lists), *((True, k, {}) for k in per_list)]

    def values(
        self, built: Any, scores: Sequence[Tensor], lists: Lists, mask: Tensor | None, k: int | Tensor | None
    ) -> dict[str, Tensor]:
        """See `Subject.values`."""
        selection: SoftSelection = built(scores[0], k, mask)
        return {"membership": selection.p, "log p": selection.log_p, "log q": selection.log_q}

    def check(self, result: Result, given: object) -> None:
        """Raise unless the membership is in [0, 1], no logarithm is NaN, and the gradient is finite."""
        p = result.values["membership"]
        require(not any(bool(x.isnan().any()) for x in result.values.values()), "log p or log q is NaN", given)
        require(bool((p <= 1 + 1e-5).all()), f"p is not in [0, 1]: {p.tolist()}", given)
        require_finite(result.gradients[0], "the gradient", given)

    def __call__(self, lists: Lists, k: int | Tensor | None = None) -> tuple[SoftSelection, Tensor]:
        """Return the selection and the gradient of a weighted sum of the membership."""
        result = self.measure(lists, lists.k if k is None else k)
        return SoftSelection(result.values["log p"], result.values["log q"], lists.mask), result.gradients[0]


def membership_is_a_probability(subject: OperatorSubject, lists: Lists) -> None:
    """The membership is in [0, 1], exp(log p) + exp(log q) = 1, and p sums to k if that is declared.

    Masked items have p = 0 and log q = 0, whatever their score.
    """
    wide = lists.with_junk()[0]
    padded, _ = subject(wide)
    require(bool((padded.p[~wide.mask] == 0).all()), "a masked item has a membership", wide)
    require(bool((padded.log_q[~wide.mask] == 0).all()), "a masked item has log q != 0", wide)
    selection, gradient = subject(lists)
    wrong = bool((selection.log_p > 1e-6).any()) or bool((selection.log_q > 1e-6).any())
    require(not wrong and not bool(selection.p.isnan().any()), f"p is not in [0, 1]: {selection.p.tolist()}", lists)
    whole = selection.log_p.exp() + selection.log_q.exp()
    require_same(whole, torch.ones_like(whole), "exp(log p) + exp(log q) is not 1", lists, LOOSE)
    require_finite(gradient, "the gradient", lists)
    if subject.template.sums_to_k:
        wanted = lists.mask.sum(-1).clamp_max(lists.k)
        require_same(selection.p.sum(-1), wanted, "the membership does not sum to k", lists, LOOSE)


def k_of_zero_or_all_is_exact(subject: OperatorSubject, lists: Lists) -> None:
    """With k = 0 no item is selected, with k >= the number of valid items all, exactly and without a gradient."""
    n = lists.scores.shape[1]
    for k, expected in ((0, torch.zeros_like(lists.mask)), (n, lists.mask), (n + 5, lists.mask)):
        selection, gradient = subject(lists, k)
        require(torch.equal(selection.p.bool(), expected), f"k = {k} gave {selection.p.tolist()}", lists)
        exact = torch.where(lists.mask & expected, -math.inf, 0.0)
        require(bool((selection.log_q.double() == exact).all()), f"log q is not exact at k = {k}", lists)
        require(bool((gradient == 0).all()), f"k = {k} gave a gradient", lists)


def k_can_be_given_per_list(subject: OperatorSubject, lists: Lists) -> None:
    """Each list uses its own k, and the result is the same as with one int."""
    if not subject.template.deterministic:
        return
    ks = torch.arange(len(lists.scores)) % (lists.scores.shape[1] + 2)
    mixed, mixed_gradient = subject(lists, ks)
    for row, k in enumerate(ks.tolist()):
        alone, alone_gradient = subject(lists.rows(torch.tensor([row])), k)
        require_same(mixed.p[row], alone.p[0], f"k = {k} as a tensor changed the membership of list {row}", lists)
        require_same(mixed_gradient[row], alone_gradient[0], f"k = {k} as a tensor changed the gradient", lists)


def fractional_k_works_or_raises(subject: OperatorSubject, lists: Lists) -> None:
    """With `fractional_k` the membership sums to any float k, also one per list. Otherwise a float is a TypeError."""
    count = lists.mask.sum(-1).double()
    each = 0.25 + torch.arange(len(lists.scores), dtype=torch.float64)
    for k in (0.5, lists.k + 0.25, each):
        scores = lists.scores.clone().requires_grad_()
        try:
            p = subject.build()(scores, k, lists.mask).p
        except TypeError:
            require(not subject.template.fractional_k, f"fractional_k is declared, but k = {k} raises", lists)
            continue
        require(subject.template.fractional_k, f"fractional_k is not declared, but k = {k} does not raise", lists)
        require_same(p.sum(-1), count.minimum(torch.as_tensor(k)), f"the sum is not k = {k}", lists, LOOSE)
        require_finite(gradient_of(p * torch.cos(lists.labels), scores)[0], f"the gradient at k = {k}", lists)


def ties_are_fair(subject: OperatorSubject, lists: Lists) -> None:
    """Two calls give identical results. Equal scores get equal membership and gradient if that is declared."""
    if not subject.template.deterministic:
        return
    (selection, gradient), (again, gradient_again) = subject(lists), subject(lists)
    require(torch.equal(selection.p, again.p) and torch.equal(gradient, gradient_again), "two calls differ", lists)
    if not subject.template.tie_fair or not lists.scores.numel():
        return
    equal = (lists.scores[:, :, None] == lists.scores[:, None, :]) & lists.mask[:, :, None] & lists.mask[:, None, :]
    same_weight = lists.labels[:, :, None] == lists.labels[:, None, :]
    for what, values, pairs in (("membership", selection.p, equal), ("gradient", gradient, equal & same_weight)):
        worst = float(torch.where(pairs, (values[:, :, None] - values[:, None, :]).abs(), 0.0).max())
        require(
            worst <= 1e-9 * max(1.0, float(values.abs().max())), f"equal scores differ in {what}: {worst:.3g}", lists
        )


def item_weights_count_copies(subject: OperatorSubject) -> None:
    """An item of weight 2 equals two copies, and one of weight 0 a masked item. k may be fractional.

    An operator that declares takes_item_weights = False raises a ValueError.
    """
    weights = torch.tensor([[1, 2, 1, 0, 3, 1, 2], [2, 1, 1, 2, 0, 1, 3], [1, 1, 2, 1, 2, 3, 0]]).double()
    operator = subject.build()
    for lists in (ordinary(), ragged(), tied()):
        scores = lists.scores.clone().requires_grad_()
        if not operator.takes_item_weights:
            try:
                operator(scores, lists.k, lists.mask, item_weights=weights)
            except ValueError:
                continue
            require(False, "takes_item_weights = False is declared, but item_weights are accepted", lists)
        along = torch.cos(1.0 + lists.labels) * lists.mask
        p = operator(scores, lists.k, lists.mask, item_weights=weights).p
        gradient = gradient_of(p * along * weights, scores)[0]
        for row in range(len(p)):
            copies, columns = lists.copies(weights, row)
            x = copies.scores.clone().requires_grad_()
            expected = operator(x, lists.k, copies.mask).p
            slope = gradient_of(expected * along[row, columns], x)[0]
            summed = torch.zeros_like(gradient[row]).index_add(0, columns, slope[0])
            require_same(p[row, columns], expected[0], "weights differ from copies", lists, 1e-6)
            require_same(gradient[row], summed, "the gradient of weights differs from that of copies", lists, 1e-6)
        if operator.sums_to_k:
            part = operator(scores, 1.7, lists.mask, item_weights=0.3 * weights).p
            total = (0.3 * weights * part).sum(1)
            wanted = torch.minimum(torch.full_like(total, 1.7), (0.3 * weights * lists.mask).sum(1))
            require_same(total, wanted, "the weighted membership does not sum to a fractional k", lists, 1e-6)


def tau_follows_the_scale_of_the_scores(subject: OperatorSubject) -> None:
    """With tau="auto", scores c x give the membership of x. The temperature is fixed after some batches, and stored."""
    template = subject.template
    if not template.scales_with_tau or "tau" not in options_of(type(template)):
        return
    lists = ragged()
    given = {**template._arguments, "tau": "auto"}
    makes = [type(template)(**given) for _ in range(3)]
    results = []
    for factor, operator in zip((1.0, 1e-3, 50.0), makes, strict=True):
        scores = (lists.scores * factor).requires_grad_()
        results.append(operator(scores, lists.k, lists.mask).p)
        x = torch.where(lists.mask, scores.detach(), torch.nan)
        apart = (x - x.nanmean(1, keepdim=True)).square().nanmean() ** 0.5
        require(abs(operator.tau / float(apart) - 1.0) < 1e-6, "tau is not the standard deviation in the lists", lists)
    if template.deterministic:
        for other in results[1:]:
            require_same(
                other, results[0], "c x at c tau is not x at tau (declare scales_with_tau = False)", lists, LOOSE
            )
    operator = makes[0]
    for batch in range(BATCHES + 1):
        fixed = operator.tau
        operator((lists.scores * (2.0 + batch)).requires_grad_(), lists.k, lists.mask)
    require(operator.tau == fixed, f"tau changed after {BATCHES} batches", lists)
    makes[1].load_state_dict(operator.state_dict())
    require(abs(makes[1].tau / operator.tau - 1.0) < 1e-6, "the state dict does not restore tau", lists)


def operators_can_be_stored(subject: OperatorSubject) -> None:
    """Pickle and state_dict restore an operator that gives the same values."""
    require_stored(subject)


def empty_batches_give_empty_selections(subject: OperatorSubject) -> None:
    """Batches without lists, without items, or without valid items give an empty selection and do not raise."""
    for lists, n in ((0, 5), (2, 0), (2, 1), (2, 5)):
        scores, mask = torch.full((lists, n), math.nan, requires_grad=True), torch.zeros(lists, n, dtype=torch.bool)
        given = Lists(scores.detach(), torch.zeros(lists, n), mask, k=1)
        selection = subject.build()(scores, 1, mask)
        require(selection.p.shape == (lists, n), f"the selection has shape {tuple(selection.p.shape)}", given)
        require(bool((selection.p == 0).all()), "a masked item was selected", given)
        require(bool((gradient_of(selection.p, scores)[0] == 0).all()), "a masked item got a gradient", given)


ON_LISTS, ONCE = rules_for(OperatorSubject, "recsys_topk.testing.shared_rules", __name__)
LISTS = (ordinary, ragged, tied)
