"""The rules for all operators. Some apply only if the operator declares them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.operators.score_scale import BATCHES
from recsys_topk.options import options_of
from recsys_topk.testing.comparison import (
    LOOSE,
    gradient_of,
    require,
    require_finite,
    require_refused_transform,
    require_same,
    require_second_derivative,
    require_transforms,
    second_derivative_along,
)
from recsys_topk.testing.host_reads import DEVICE, no_host_reads
from recsys_topk.testing.lists import Lists, distinct, extreme, ordinary, ragged, short, short_ragged, tied


class OperatorSubject:
    """An operator under test. Builds it with the attributes that a rule needs, and calls it.

    Args:
        target: An operator class, a function without arguments that returns an operator, or an operator.
    """

    def __init__(self, target: type[TopKOperator] | Callable[[], TopKOperator] | TopKOperator) -> None:
        self.template = target if isinstance(target, TopKOperator) else target()
        self.name = type(self.template).__name__

    def build(self, **attributes: Any) -> TopKOperator:
        """Return a copy of the operator with the given attributes."""
        operator = copy.deepcopy(self.template)
        for name, value in attributes.items():
            setattr(operator, name, value)
        return operator

    def __call__(self, lists: Lists, k: int | Tensor | None = None) -> tuple[SoftSelection, Tensor]:
        """Return the selection and the gradient of a weighted sum of the membership."""
        scores = lists.scores.clone().requires_grad_()
        selection = self.build()(scores, lists.k if k is None else k, lists.mask)
        # The weights depend on the labels alone, so that they move with the items.
        weights = torch.cos(1.0 + lists.labels) * lists.mask
        gradient = gradient_of(selection.p * weights.to(selection.p.dtype), scores)[0]
        plain = SoftSelection(selection.log_p.detach(), selection.log_q.detach(), selection.mask)
        return plain, gradient


def masked_items_have_no_effect(subject: OperatorSubject, lists: Lists) -> None:
    """Masked items of any value have no effect, and get p = 0, log q = 0 and no gradient."""
    wide, where = lists.with_junk()
    selection, gradient = subject(lists)
    padded, padded_gradient = subject(wide)
    for given, result, slope in ((lists, selection, gradient), (wide, padded, padded_gradient)):
        outside = ~given.mask
        require(bool((result.p[outside] == 0).all()), "a masked item has a membership", given)
        require(bool((result.log_q[outside] == 0).all()), "a masked item has log q != 0", given)
        require(bool((slope[outside] == 0).all()), "a masked item got a gradient", given)
    if subject.template.deterministic:
        require_same(padded.p[:, where], selection.p, "masked items changed the membership", wide)
        require_same(padded_gradient[:, where], gradient, "masked items changed the gradient", wide)


def order_of_items_does_not_matter(subject: OperatorSubject, lists: Lists) -> None:
    """Permuting the items of a list permutes the membership and the gradient."""
    operator = subject.template
    if not (operator.deterministic and operator.equivariant and (operator.tie_fair or distinct(lists))):
        return
    other, order = lists.shuffled()
    (selection, gradient), (shuffled, shuffled_gradient) = subject(lists), subject(other)
    require_same(shuffled.p, selection.p[:, order], "permuting the items changed the membership", lists)
    require_same(shuffled.log_q, selection.log_q[:, order], "permuting the items changed log q", lists)
    require_same(shuffled_gradient, gradient[:, order], "permuting the items changed the gradient", lists)


def lists_do_not_influence_each_other(subject: OperatorSubject, lists: Lists) -> None:
    """Each list has the same membership and gradient alone as in the batch."""
    if not subject.template.deterministic:
        return
    selection, gradient = subject(lists)
    for row in range(len(lists.scores)):
        alone, alone_gradient = subject(lists.rows(torch.tensor([row])))
        require_same(alone.p[0], selection.p[row], f"list {row} has a different membership alone", lists)
        require_same(alone_gradient[0], gradient[row], f"list {row} has a different gradient alone", lists)


def membership_is_a_probability(subject: OperatorSubject, lists: Lists) -> None:
    """The membership is in [0, 1], exp(log p) + exp(log q) = 1, and p sums to k if that is declared."""
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


def inputs_are_not_modified(subject: OperatorSubject, lists: Lists) -> None:
    """Neither the forward nor the backward pass modifies its inputs, with and without a mask."""
    for masked in (True, False):
        scores = torch.where(lists.mask, lists.scores, 0.0).requires_grad_()
        mask, before = lists.mask.clone(), scores.detach().clone()
        gradient_of(subject.build()(scores, lists.k, mask if masked else None).p, scores)
        same = torch.equal(mask, lists.mask) and torch.equal(scores.detach(), before)
        require(same, "the call changed its input", lists)


def half_precision_is_computed_in_float32(subject: OperatorSubject) -> None:
    """float16, bfloat16 and autocast give the float32 result in float32; float64 stays float64."""
    lists = ragged()
    require(subject(lists)[0].log_p.dtype == torch.float64, "float64 scores did not give float64", lists)
    for dtype in (torch.float16, torch.bfloat16):
        half = lists.to(dtype)
        selection, gradient = subject(half)
        with torch.autocast(half.scores.device.type, dtype=torch.bfloat16):
            cast, _ = subject(half)
        for result in (selection, cast):
            require(result.log_p.dtype == torch.float32, f"{dtype} scores gave {result.log_p.dtype}", half)
            require(result.log_q.dtype == torch.float32, f"{dtype} scores gave {result.log_q.dtype}", half)
        require_finite(gradient, "the gradient", half)
        if subject.template.deterministic:
            exact, _ = subject(half.to(torch.float32))
            require_same(selection.p, exact.p, f"{dtype} scores were not computed in float32", half, LOOSE)
            require_same(cast.p, exact.p, "autocast changed the membership", half, LOOSE)


def validate_raises_on_non_finite_scores(subject: OperatorSubject) -> None:
    """validate=True raises a ValueError for NaN or infinity among valid scores, but not for padding."""
    lists = ragged()
    for bad in (math.nan, math.inf, -math.inf):
        subject.build(validate=True)(torch.where(lists.mask, lists.scores, bad), lists.k, lists.mask)
        spoilt = lists.with_scores(lists.scores.masked_fill(torch.arange(7) == 4, bad))
        try:
            subject.build(validate=True)(spoilt.scores, spoilt.k, spoilt.mask)
        except ValueError:
            continue
        require(False, f"validate=True did not raise a ValueError for a valid score of {bad}", spoilt)


def gradient_matches_finite_differences(subject: OperatorSubject) -> None:
    """The gradient matches finite differences in float64, away from ties, unless exact_gradient = False is declared."""
    if not (subject.template.exact_gradient and subject.template.deterministic):
        return
    for lists in (ordinary(), ragged()):
        operator = subject.build()

        def membership(scores: Tensor, operator: TopKOperator = operator, lists: Lists = lists) -> Tensor:
            p: Tensor = operator(scores, lists.k, lists.mask).p
            return p

        require(
            torch.autograd.gradcheck(membership, (lists.scores.clone().requires_grad_(),), raise_exception=False),
            "the gradient differs from finite differences",
            lists,
        )


def second_derivatives_are_correct_or_raise(subject: OperatorSubject) -> None:
    """The derivative of a gradient with create_graph=True is correct or raises. It is never silently 0."""
    operator = subject.build()
    for lists in (ordinary(), ragged()):
        weights = torch.cos(1.0 + lists.labels)

        def membership(scores: Tensor, lists: Lists = lists, weights: Tensor = weights) -> Tensor:
            p: Tensor = operator(scores, lists.k, lists.mask).p
            return p * weights

        if subject.template.deterministic:
            require_second_derivative(membership, lists.scores, subject.template.exact_gradient, lists)
        else:
            refused = second_derivative_along(membership, lists.scores, torch.ones_like(lists.scores)) is None
            require(refused, "a random operator has no second derivative, but does not raise", lists)


def torch_func_transforms_agree(subject: OperatorSubject) -> None:
    """torch.func and forward mode work. An operator that declares transformable = False raises a clear error."""
    operator = subject.build()
    for lists in (ordinary(), ragged()):

        def membership(scores: Tensor, mask: Tensor, lists: Lists = lists) -> Tensor:
            p: Tensor = operator(scores, lists.k, mask).p
            return p

        check = require_transforms if subject.template.transformable else require_refused_transform
        check(membership, lists.scores, lists.mask, lists)


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


def compiled_results_are_equal(subject: OperatorSubject) -> None:
    """torch.compile(fullgraph=True) gives the same membership and gradient."""
    for lists, mask in ((short(), None), (short_ragged(), short_ragged().mask)):
        torch.compiler.reset()
        scores = lists.scores.clone().requires_grad_()
        compiled = torch.compile(subject.build(), fullgraph=True, backend="aot_eager")
        selection = compiled(scores, lists.k, mask)
        gradient = gradient_of(selection.p * torch.cos(1.0 + lists.labels) * lists.mask, scores)[0]
        if subject.template.deterministic:
            plain, plain_gradient = subject(lists)
            require_same(selection.p, plain.p, "compiling changed the membership", lists)
            require_same(selection.log_q, plain.log_q, "compiling changed log q", lists)
            require_same(gradient, plain_gradient, "compiling changed the gradient", lists)
    torch.compiler.reset()


def operators_can_be_stored(subject: OperatorSubject) -> None:
    """Pickle and state_dict restore an operator that gives the same values."""
    lists, operator = ordinary(), subject.build()
    pickled, loaded = pickle.loads(pickle.dumps(operator)), subject.build()
    loaded.load_state_dict(operator.state_dict())
    if subject.template.deterministic:
        expected = operator(lists.scores, lists.k, lists.mask).p
        for kind, other in (("pickled", pickled), ("state_dict", loaded)):
            value = other(lists.scores, lists.k, lists.mask).p
            require_same(value, expected, f"the {kind} operator gives a different membership", lists)


def large_scores_give_finite_results(subject: OperatorSubject) -> None:
    """float32 scores of 1e4 and 1e30, far from 0 or very close together, give a membership and finite gradients."""
    for lists in extreme():
        selection, gradient = subject(lists)
        require(not bool(selection.log_p.isnan().any() | selection.log_q.isnan().any()), "log p or log q is NaN", lists)
        require(bool((selection.p <= 1 + 1e-5).all()), f"p is not in [0, 1]: {selection.p.tolist()}", lists)
        require_finite(gradient, "the gradient", lists)


def empty_batches_give_empty_selections(subject: OperatorSubject) -> None:
    """Batches without lists, without items, or without valid items give an empty selection and do not raise."""
    for lists, n in ((0, 5), (2, 0), (2, 1), (2, 5)):
        scores, mask = torch.full((lists, n), math.nan, requires_grad=True), torch.zeros(lists, n, dtype=torch.bool)
        given = Lists(scores.detach(), torch.zeros(lists, n), mask, k=1)
        selection = subject.build()(scores, 1, mask)
        require(selection.p.shape == (lists, n), f"the selection has shape {tuple(selection.p.shape)}", given)
        require(bool((selection.p == 0).all()), "a masked item was selected", given)
        require(bool((gradient_of(selection.p, scores)[0] == 0).all()), "a masked item got a gradient", given)


def no_values_are_read_on_the_host(subject: OperatorSubject) -> None:
    """On devices other than the CPU neither pass waits for the device, with and without a mask, for every form of k."""
    lists, operator = ordinary(), subject.build().to(DEVICE)
    scores, mask = lists.scores.float().to(DEVICE).requires_grad_(), lists.mask.to(DEVICE)
    each = torch.zeros(len(scores), dtype=torch.int64, device=DEVICE)
    forms = [(None, lists.k), (mask, lists.k), (mask, each), *([(mask, each.float())] if operator.fractional_k else [])]
    for masked, k in forms:
        with no_host_reads():
            selection = operator(scores, k, masked)
            (selection.log_p + selection.log_q).sum().backward()


ON_LISTS: tuple[Callable[[OperatorSubject, Lists], None], ...] = (
    masked_items_have_no_effect,
    order_of_items_does_not_matter,
    lists_do_not_influence_each_other,
    membership_is_a_probability,
    k_of_zero_or_all_is_exact,
    k_can_be_given_per_list,
    fractional_k_works_or_raises,
    ties_are_fair,
    inputs_are_not_modified,
)
ONCE: tuple[Callable[[OperatorSubject], None], ...] = (
    half_precision_is_computed_in_float32,
    validate_raises_on_non_finite_scores,
    gradient_matches_finite_differences,
    second_derivatives_are_correct_or_raise,
    torch_func_transforms_agree,
    item_weights_count_copies,
    tau_follows_the_scale_of_the_scores,
    compiled_results_are_equal,
    no_values_are_read_on_the_host,
    operators_can_be_stored,
    large_scores_give_finite_results,
    empty_batches_give_empty_selections,
)
LISTS: tuple[Callable[[], Lists], ...] = (ordinary, ragged, tied)
