"""The losses of soft top-k memberships in one pass: positives, threshold, cross-entropy and gradient of each list."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys_topk.numerics import SLACK, full_mask
from recsys_topk.ops.backends.machine_code import Kernel
from recsys_topk.ops.backends.task import Task, address_of, run
from recsys_topk.ops.dispatch import is_float32, is_real, may_read, operation, runs_triton
from recsys_topk.ops.losses.find_positives import find_positives
from recsys_topk.ops.losses.known_gradient import known_gradient
from recsys_topk.ops.losses.topk_target import best_positives
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.clip import clip_threshold
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.from_threshold import from_threshold
from recsys_topk.ops.selection.membership import CLAMP, Law, membership_logs
from recsys_topk.ops.selection.weighted import weighted_pair
from recsys_topk.processes import divisor, divisors

LONGEST_ON_GPU = 8192  # items of a list; one program holds whole lists

_MODULES = {
    "dftopk": "memberships",
    "logistic": "memberships",
    "laplace": "memberships",
    "clip": "clip",
    "fenchel_young": "clip",
}
_KERNELS = {
    (law, weighted): Kernel(f"recsys_topk.ops.backends.compiled.{module}:{law}_{'weighted' if weighted else 'kernel'}")
    for law, module in _MODULES.items()
    for weighted in (False, True)
}


@operation
def topk_loss(
    scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | Tensor | None, above: float, law: Law, mean: bool,
    item_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the loss of each list, (B,), or its mean over the lists that count, and which lists count.

    A list counts if it has a valid positive item and 0 < k < its number of valid items; the loss of the others is 0.
    The true items are the positives whose label reaches the k-th largest of the list.

    Args:
        scores: (B, N), N >= 2; masked places may hold anything.
        labels: (B, N), the dtype of scores.
        mask: Boolean (B, N); None = all items are real.
        k: One int, one int per list, (B,), or None: each list's number of positives.
        above: Items with a label above this are positive.
        law: Which membership and loss.
        mean: Return the mean over the lists that count; 0 if no list counts.
        item_weights: (B, N), at least 0, constants; None = 1. An item of weight 2 equals two copies of it, an item of
            weight 0 a masked one, so that "number of items" reads "sum of weights" above, and k may be fractional.

    Returns:
        The losses or their mean, and a boolean (B,); None if all lists are known to count.
    """
    lists = counted_lists(labels, mask, k, above, item_weights)
    # Lists that do not count are replaced by lists of equal scores.
    counted, row = lists.counted, lists.counted[:, None]
    valid = full_mask(scores) if lists.mask is None else lists.mask | ~row
    x = torch.where(row if lists.mask is None else lists.mask & row, scores, 0.0)
    ks = torch.where(counted, lists.wanted, 1)
    weights = None if lists.weights is None else torch.where(row, lists.weights, 1.0)
    losses = torch.where(counted, _list_losses(x, lists.target & row, valid, ks, lists.items, law, weights), 0.0)
    if mean:
        losses = losses.sum() / divisor(counted.sum(), losses.dtype)
    return losses, None if may_read(scores) and bool(counted.all()) else counted


class CountedLists(NamedTuple):
    """Which lists count, and what follows from labels, mask, k and weights.

    Attributes:
        mask: Boolean (B, N), the items with a weight; None = all.
        weights: (B, N), 0 where masked; None = 1.
        items: (B,), the number of items, or the sum of their weights.
        wanted: (B,), k, capped at `items`.
        counted: Boolean (B,), the lists with a positive item and 0 < k < items.
        target: Boolean (B, N), the true items of the lists that count.
    """

    mask: Tensor | None
    weights: Tensor | None
    items: Tensor
    wanted: Tensor
    counted: Tensor
    target: Tensor


def counted_lists(
    labels: Tensor, mask: Tensor | None, k: int | Tensor | None, above: float, item_weights: Tensor | None
) -> CountedLists:
    """Return which lists count and which of their items are true; for the arguments see `topk_loss`."""
    weights: Tensor | None = None
    if item_weights is not None and labels.shape[1]:
        weights = item_weights.detach().to(labels.dtype)
        weights = weights if mask is None else torch.where(mask, weights, 0.0)
        mask = weights > 0
    positive, positives = find_positives(labels, mask, above)
    some = positives > 0
    if weights is not None:
        items, positives = weights.sum(1), torch.where(positive, weights, 0.0).sum(1)
    else:
        items = torch.full_like(positives, labels.shape[1]) if mask is None else count_true(mask)
    wanted = positives if k is None else k.to(items.dtype) if isinstance(k, Tensor) else torch.full_like(items, k)
    wanted = torch.minimum(wanted, items)
    counted = some & (wanted > 0) & (wanted < (items if weights is None else (1.0 - SLACK) * items))
    if weights is None:
        target = best_positives(labels, positive, wanted.clamp_min(1))
    else:
        held = torch.where(positive, weights, 0.0)
        boundary = weighted_pair(torch.where(positive, labels, -math.inf), wanted, held)[0]
        target = positive & (labels >= boundary)
    return CountedLists(mask, weights, items, wanted, counted, target)


def bounded_logs(x: Tensor, ks: Tensor, valid: Tensor, weights: Tensor | None, law: Law) -> tuple[Tensor, Tensor]:
    """Return the logarithms of `membership_logs` as they enter a cross-entropy: those of ``"clip"`` are clamped."""
    log_p, log_q = membership_logs(x, ks, valid, law, item_weights=weights)
    if law.name != "clip":
        return log_p, log_q
    low, high = math.log(CLAMP), math.log1p(-CLAMP)
    return log_p.clamp(low, high), log_q.clamp(low, high)


def _list_losses(
    x: Tensor, target: Tensor, valid: Tensor, ks: Tensor, items: Tensor, law: Law, weights: Tensor | None
) -> Tensor:
    """Return the loss of each list, (B,), for 0 < k < number of valid items and scores of 0 where masked."""
    if law.name == "fenchel_young":
        return fenchel_young(x, target, valid, law.tau, weights)
    log_p, log_q = bounded_logs(x, ks, valid, weights, law)
    chosen = torch.where(valid, torch.where(target, log_p, log_q), 0.0)
    if law.others != 1.0:
        part = torch.where(target, 1.0, law.others) * (valid.to(x.dtype) if weights is None else weights)
        return -torch.where(part > 0, chosen * part, 0.0).sum(1) / torch.where(target.any(1), part.sum(1), 1.0)
    return -(chosen if weights is None else chosen * weights).sum(1) / torch.where(items > 0, items, 1)


def fenchel_young(x: Tensor, target: Tensor, valid: Tensor, tau: float, weights: Tensor | None = None) -> Tensor:
    """Return the Fenchel-Young loss of the clipped membership of each list, (B,); 0 if all or no items are true.

    Args:
        x: (B, N), 0 where masked.
        target: Boolean (B, N), the true items.
        valid: Boolean (B, N).
        tau: Temperature.
        weights: Weights of the items, (B, N); None = 1.
    """
    if weights is None:
        items, wanted = count_true(valid), count_true(target)
    else:
        items, wanted = (torch.where(which, weights, 0.0).sum(1) for which in (valid, target))
    proper = target.any(1) & (valid & ~target).any(1)  # tied labels may make every item true
    ks = torch.where(proper, wanted, 1)
    if weights is None:
        moved, gap = centred(torch.where(valid, x, -math.inf), ks)
    else:
        weights = torch.where(proper[:, None], torch.where(valid, weights, 0.0), 1.0)
        filled = torch.where(weights > 0, x, -math.inf)
        kept, cut = weighted_pair(filled, ks, weights)
        moved, gap = filled - cut, kept - cut
    threshold = clip_threshold(moved.detach() / tau, gap / tau, ks, weights)
    z = from_threshold(moved, threshold * tau, tau, "uniform", weights)
    wrong = torch.where(valid & proper[:, None], torch.where(target, 1.0 - z, z), 0.0)
    hinge = torch.where(wrong >= 1.0, wrong - 0.5, 0.5 * wrong.clamp_min(0.0).square())
    return tau * (hinge if weights is None else hinge * weights).sum(1) / torch.where(items > 0, items, 1)


def _serves(
    scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | Tensor | None, above: float, law: Law, mean: bool,
    item_weights: Tensor | None = None,
) -> bool:  # fmt: skip
    return (
        is_float32(scores, labels)
        and (law.others == 1.0 or (item_weights is not None and _MODULES[law.name] == "memberships"))
        and not labels.requires_grad
        and (mask is None or is_real(mask))
        and (item_weights is None or is_real(item_weights))
        and (not isinstance(k, Tensor) or is_real(k))
        and scores.numel() > 0
        and scores.shape[1] < 2**31 - 64
    )


@topk_loss.backend("numba", _serves)
def _numba(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    labels, mask, k, above, law, mean, item_weights = (*rest, None)[:7]
    lists, n = scores.shape
    x, y = scores.detach().contiguous(), labels.contiguous()
    m = None if mask is None else mask.contiguous()
    w = None if item_weights is None else item_weights.detach().float().contiguous()
    ks = k.double().contiguous() if isinstance(k, Tensor) else None
    gradient = torch.empty(lists, n) if scores.requires_grad and torch.is_grad_enabled() else None
    losses, counted = torch.empty(lists), torch.empty(lists, dtype=torch.bool)
    task = Task(
        lists=lists,
        items=n,
        scores=x.data_ptr(),
        labels=y.data_ptr(),
        mask=address_of(m),
        weights=address_of(w),
        ks=address_of(ks),
        k=-1 if k is None or ks is not None else k,
        stages=1,
        quotas=0,
        losses=losses.data_ptr(),
        counted=counted.data_ptr(),
        gradient=address_of(gradient),
        joint_gradient=0,
        above=above,
        tau=law.tau,
        alpha=law.alpha,
        others=law.others,
        scale=1.0 / lists if mean else 1.0,
    )
    number, total = run(_KERNELS[law.name, w is not None], task, 3 if w is None else 4)
    if number != number:  # a score is not finite, or its square overflows
        return topk_loss.reference(scores, *rest)
    which = None if number == lists else counted
    (divided_by,) = divisors([int(number)]) if mean else (1.0,)
    value = torch.full((), total / divided_by) if mean else losses
    if gradient is not None and mean and divided_by != lists:
        gradient.mul_(lists / divided_by)
    return known_gradient(scores, value, gradient, lambda x: topk_loss.reference(x, *rest)[0]), which


def _serves_triton(
    scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | Tensor | None, above: float, law: Law, mean: bool,
    item_weights: Tensor | None = None,
) -> bool:  # fmt: skip
    given = [x for x in (scores, labels, mask, k) if isinstance(x, Tensor)]
    whole = k is None or isinstance(k, int) or not k.is_floating_point()
    usual = item_weights is None and whole and not labels.requires_grad and law.others == 1.0
    return usual and runs_triton(*given) and 2 <= scores.shape[1] <= LONGEST_ON_GPU


@topk_loss.backend("triton", _serves_triton, traced=True)
def _triton(*args: Any) -> tuple[Tensor, Tensor | None]:
    from recsys_topk.ops.backends.triton_kernels.topk_loss import topk_loss_triton

    return topk_loss_triton(*args[:7])
