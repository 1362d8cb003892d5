"""The rules for all losses."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.testing.comparison import (
    LOOSE,
    gradient_of,
    require,
    require_finite,
    require_refused_transform,
    require_same,
    require_second_derivative,
    require_transforms,
)
from recsys_topk.testing.host_reads import DEVICE, no_host_reads
from recsys_topk.testing.lists import Lists, distinct, extreme, ordinary, ragged, short, short_ragged, tied


class LossSubject:
    """A loss under test. Builds it with the attributes that a rule needs, and calls it.

    Args:
        target: A loss class, a function without arguments that returns a loss, or a loss.
    """

    def __init__(self, target: type[RankingLoss] | Callable[[], RankingLoss] | RankingLoss) -> None:
        self.template = target if isinstance(target, RankingLoss) else target()
        self.name = type(self.template).__name__
        operator = self.template.operator
        self.deterministic = operator is None or operator.deterministic
        self.equivariant = operator is None or operator.equivariant
        self.tie_fair = operator is None or operator.tie_fair
        own = getattr(self.template, "exact_gradient", True)
        self.exact_gradient = own and (operator is None or operator.exact_gradient)

    def build(self, **attributes: Any) -> RankingLoss:
        """Return a copy of the loss with the given attributes."""
        loss = copy.deepcopy(self.template)
        for name, value in attributes.items():
            setattr(loss, name, value)
        return loss

    def cuts(self, lists: Lists) -> list[int | None]:
        """Return the values of k to test: None only for losses that do not require k."""
        return [lists.k] if self.template.requires_k else [None, lists.k]

    def function(self, lists: Lists, k: int | None) -> Callable[..., Tensor]:
        """Return the loss of each list as a function of the scores, (B, N), and a mask (by default that of `lists`)."""
        loss = self.build(reduction="none")

        def losses(scores: Tensor, mask: Tensor = lists.mask) -> Tensor:
            value: Tensor = loss(scores, lists.labels, mask, k=k)
            return value

        return losses

    def __call__(
        self, lists: Lists, k: int | Tensor | None, reduction: str = "none", weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of its sum."""
        scores = lists.scores.clone().requires_grad_()
        value = self.build(reduction=reduction)(scores, lists.labels, lists.mask, k=k, weights=weights)
        return value.detach(), gradient_of(value, scores)[0]


def masked_items_have_no_effect(subject: LossSubject, lists: Lists) -> None:
    """Masked items of any value change neither loss nor gradient, and get no gradient."""
    wide, where = lists.with_junk()
    for k in subject.cuts(lists):
        value, gradient = subject(lists, k)
        padded, padded_gradient = subject(wide, k)
        inner = torch.where(lists.mask, gradient, 0.0)
        require(bool((gradient == inner).all()), "a masked item got a gradient", lists)
        outer = torch.ones(wide.scores.shape[1], dtype=torch.bool)
        outer[where] = False
        require(bool((padded_gradient[:, outer] == 0).all()), "a masked item got a gradient", wide)
        if subject.deterministic:
            require_same(padded, value, "masked items changed the loss", wide)
            require_same(padded_gradient[:, where], gradient, "masked items changed the gradient", wide)


def order_of_items_does_not_matter(subject: LossSubject, lists: Lists) -> None:
    """Permuting the items of a list does not change the loss, and permutes the gradient."""
    if not (subject.deterministic and subject.equivariant and (subject.tie_fair or distinct(lists))):
        return
    other, order = lists.shuffled()
    for k in subject.cuts(lists):
        value, gradient = subject(lists, k)
        shuffled, shuffled_gradient = subject(other, k)
        require_same(shuffled, value, "permuting the items changed the loss", lists)
        require_same(shuffled_gradient, gradient[:, order], "permuting the items changed the gradient", lists)


def lists_do_not_influence_each_other(subject: LossSubject, lists: Lists) -> None:
    """Each list has the same loss and gradient alone as in the batch."""
    if not subject.deterministic:
        return
    for k in subject.cuts(lists):
        value, gradient = subject(lists, k)
        for row in range(len(value)):
            alone, alone_gradient = subject(lists.rows(torch.tensor([row])), k)
            require_same(alone[0], value[row], f"list {row} has a different loss when it is alone", lists)
            require_same(alone_gradient[0], gradient[row], f"list {row} has a different gradient alone", lists)


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


def inputs_are_not_modified(subject: LossSubject, lists: Lists) -> None:
    """Neither the forward nor the backward pass modifies its inputs, with and without a mask."""
    for k in subject.cuts(lists):
        for masked in (True, False):
            scores = torch.where(lists.mask, lists.scores, 0.0).requires_grad_()
            labels, mask, before = lists.labels.clone(), lists.mask.clone(), scores.detach().clone()
            gradient_of(subject.build(reduction="sum")(scores, labels, mask if masked else None, k=k), scores)
            same = torch.equal(labels, lists.labels) and torch.equal(mask, lists.mask)
            require(same and torch.equal(scores.detach(), before), "the call changed its input", lists)


def losses_are_finite_and_not_negative(subject: LossSubject, lists: Lists) -> None:
    """Value and gradient are finite for finite scores. The value is not negative (learned weights would diverge)."""
    for k in subject.cuts(lists):
        value, gradient = subject(lists, k)
        require_finite(value, "the loss", lists)
        require_finite(gradient, "the gradient", lists)
        require(bool((value >= -1e-6).all()), f"the loss is negative: {value.tolist()}", lists)


def half_precision_is_computed_in_float32(subject: LossSubject) -> None:
    """float16, bfloat16 and autocast give the float32 result in float32; float64 stays float64."""
    lists = ragged()
    for k in subject.cuts(lists):
        require(subject(lists, k)[0].dtype == torch.float64, "float64 scores did not give a float64 loss", lists)
        for dtype in (torch.float16, torch.bfloat16):
            half = lists.to(dtype)
            value, gradient = subject(half, k)
            require(value.dtype == torch.float32, f"{dtype} scores gave a loss of {value.dtype}", half)
            require_finite(gradient, "the gradient", half)
            with torch.autocast(half.scores.device.type, dtype=torch.bfloat16):
                cast, _ = subject(half, k)
            require(cast.dtype == torch.float32, f"under autocast the loss is {cast.dtype}", half)
            if subject.deterministic:
                exact, _ = subject(half.to(torch.float32), k)
                require_same(value, exact, f"{dtype} scores were not computed in float32", half, LOOSE)
                require_same(cast, exact, "autocast changed the loss", half, LOOSE)


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


def validate_raises_on_non_finite_scores(subject: LossSubject) -> None:
    """validate=True raises a ValueError for NaN or infinity among valid scores, but not for padding."""
    lists = ragged()
    for k in subject.cuts(lists):
        for bad in (math.nan, math.inf, -math.inf):
            scores = torch.where(lists.mask, lists.scores, bad)
            subject.build(validate=True)(scores, lists.labels, lists.mask, k=k)
            spoilt = lists.with_scores(lists.scores.masked_fill(torch.arange(7) == 4, bad))
            try:
                subject.build(validate=True)(spoilt.scores, spoilt.labels, spoilt.mask, k=k)
            except ValueError:
                continue
            require(False, f"validate=True did not raise a ValueError for a valid score of {bad}", spoilt)


def gradient_matches_finite_differences(subject: LossSubject) -> None:
    """The gradient matches finite differences in float64, away from ties, unless exact_gradient = False is declared."""
    if not (subject.exact_gradient and subject.deterministic):
        return
    for lists in (ordinary(), ragged()):
        for k in subject.cuts(lists):
            value = subject.function(lists, k)
            require(
                torch.autograd.gradcheck(value, (lists.scores.clone().requires_grad_(),), raise_exception=False),
                f"the gradient (k = {k}) differs from finite differences",
                lists,
            )


def second_derivatives_are_correct_or_raise(subject: LossSubject) -> None:
    """The derivative of a gradient with create_graph=True is correct or raises. It is never silently 0."""
    if not subject.deterministic:
        return
    for lists in (ordinary(), ragged()):
        for k in subject.cuts(lists):
            value = subject.function(lists, k)
            require_second_derivative(value, lists.scores, subject.exact_gradient, lists)


def torch_func_transforms_agree(subject: LossSubject) -> None:
    """torch.func and forward mode work. An operator that declares transformable = False raises a clear error."""
    operator = subject.template.operator
    refused = operator is not None and not operator.transformable
    for lists in (ordinary(), ragged()):
        for k in subject.cuts(lists):
            check = require_refused_transform if refused else require_transforms
            check(subject.function(lists, k), lists.scores, lists.mask, lists)


def compiled_results_are_equal(subject: LossSubject) -> None:
    """torch.compile(fullgraph=True) gives the same loss and gradient. Operators have a separate rule without masks."""
    unmasked = [] if subject.template.operator is not None else [(short(), None, subject.cuts(short())[0])]
    for lists, mask, k in (*unmasked, (short_ragged(), short_ragged().mask, short_ragged().k)):
        torch.compiler.reset()
        scores = lists.scores.clone().requires_grad_()
        compiled = torch.compile(subject.build(reduction="none"), fullgraph=True, backend="aot_eager")
        value = compiled(scores, lists.labels, mask, k=k)
        gradient = gradient_of(value, scores)[0]
        if subject.deterministic:
            plain, plain_gradient = subject(lists, k)
            require_same(value, plain, "compiling changed the loss", lists)
            require_same(gradient, plain_gradient, "compiling changed the gradient", lists)
    torch.compiler.reset()


def losses_can_be_stored(subject: LossSubject) -> None:
    """Pickle and state_dict restore a loss that gives the same values."""
    lists = ordinary()
    for k in subject.cuts(lists):
        loss = subject.build()
        pickled = pickle.loads(pickle.dumps(loss))
        loaded = subject.build()
        loaded.load_state_dict(loss.state_dict())
        if subject.deterministic:
            expected = loss(lists.scores, lists.labels, lists.mask, k=k)
            for kind, other in (("pickled", pickled), ("state_dict", loaded)):
                value = other(lists.scores, lists.labels, lists.mask, k=k)
                require_same(value, expected, f"the {kind} loss gives a different value", lists)


def large_scores_give_finite_results(subject: LossSubject) -> None:
    """float32 scores of 1e4 and 1e30, far from 0 or very close together, give finite losses and gradients."""
    for lists in extreme():
        losses_are_finite_and_not_negative(subject, lists)


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


def no_values_are_read_on_the_host(subject: LossSubject) -> None:
    """On devices other than the CPU neither pass waits for the device, with and without a mask, for every form of k."""
    lists = ordinary()
    scores, labels, mask = (x.to(DEVICE) for x in (lists.scores.float(), lists.labels.float(), lists.mask))
    each = torch.zeros(len(scores), dtype=torch.int64, device=DEVICE)
    forms: list[tuple[Tensor | None, int | Tensor | None, str | None]] = [(None, k, None) for k in subject.cuts(lists)]
    for masked, k, own in [*forms, (mask, lists.k, None), (mask, each, None), (mask, None, "positives")]:
        loss = subject.build(k=own).to(DEVICE)
        with no_host_reads():
            loss(scores.requires_grad_(), labels, masked, k=k).sum().backward()


ON_LISTS: tuple[Callable[[LossSubject, Lists], None], ...] = (
    masked_items_have_no_effect,
    order_of_items_does_not_matter,
    lists_do_not_influence_each_other,
    lists_without_positives_are_skipped,
    k_can_be_given_per_list,
    the_same_input_gives_the_same_loss,
    flat_lists_equal_rows,
    inputs_are_not_modified,
    losses_are_finite_and_not_negative,
)
ONCE: tuple[Callable[[LossSubject], None], ...] = (
    half_precision_is_computed_in_float32,
    item_weights_count_copies,
    labels_get_no_gradient,
    weights_and_reductions_agree,
    validate_raises_on_non_finite_scores,
    gradient_matches_finite_differences,
    second_derivatives_are_correct_or_raise,
    torch_func_transforms_agree,
    compiled_results_are_equal,
    no_values_are_read_on_the_host,
    losses_can_be_stored,
    large_scores_give_finite_results,
    empty_batches_give_zero,
)
LISTS: tuple[Callable[[], Lists], ...] = (ordinary, ragged, tied)
