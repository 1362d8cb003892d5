"""Memberships of weighted items: an item of weight 2 counts as two copies, and sum_i w_i p_i = k."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recsys_topk.numerics import LOG2
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.from_threshold import Law as DistributionName
from recsys_topk.ops.selection.from_threshold import from_threshold
from recsys_topk.ops.selection.logistic import logistic_logs
from recsys_topk.ops.selection.membership import Law


def weighted_pair(x: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores at which the cumulated weight reaches k and passes k, (B, 1) each, differentiable.

    For whole weights they are the k-th and the (k+1)-th score of the list with w_i copies of item i. The gradient of a
    score is shared among the items equal to it, in proportion to their weights.

    Args:
        x: (B, N), -inf where masked.
        k: (B,), 0 < k < sum of the weights.
        weights: (B, N), 0 where masked.

    Example:
        >>> weighted_pair(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([2.0]), torch.tensor([[0.5, 1.5, 1.0]]))
        (tensor([[2.]]), tensor([[1.]]))
    """
    ordered, order = x.detach().sort(dim=1, descending=True)
    summed, wanted = weights.double().gather(1, order).cumsum(1), k.double()[:, None]
    last = x.shape[1] - 1
    places = ((summed < wanted).sum(1, keepdim=True), (summed <= wanted).sum(1, keepdim=True))
    kept, cut = (ordered.gather(1, place.clamp_max(last)) for place in places)
    return _mean_at(x, kept, weights), _mean_at(x, cut, weights)


def _mean_at(x: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    share = torch.where(x.detach() == value, weights, 0.0)
    # The sum is exactly 0, with the gradient of a mean.
    return value + (torch.where(share > 0, x - value, 0.0) * share).sum(1, keepdim=True) / share.sum(1, keepdim=True)


def weighted_logs(scores: Tensor, k: Tensor, mask: Tensor, weights: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 - p) of a law's membership of weighted items, (B, N) each.

    Args:
        scores: (B, N), 0 where masked.
        k: (B,), 0 < k < sum of the weights.
        mask: Boolean (B, N).
        weights: (B, N), 0 where masked.
        law: ``"dftopk"`` (with the pair of `weighted_pair`), or ``"logistic"``, ``"laplace"``, ``"clip"``:
            p_i = F((x_i - b) / tau) with b such that sum_i w_i p_i = k.

    Example:
        >>> x, w = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[1.0, 2.0, 1.0]])
        >>> log_p, _ = weighted_logs(x, torch.tensor([1.5]), w > 0, w, Law("logistic", 1.0))
        >>> (w * log_p.exp()).sum()
        tensor(1.5000)
    """
    filled = fill_masked(scores, mask, -math.inf)
    kept, cut = weighted_pair(filled, k, weights)
    if law.name == "dftopk":
        return logistic_logs((scores - (cut + law.alpha * (kept - cut))) / law.tau)
    kept, cut = kept.detach(), cut.detach()
    moved = filled - cut
    threshold = _threshold(moved.detach(), kept - cut, k, weights, law)
    names: dict[str, DistributionName] = {"logistic": "logistic", "laplace": "laplace", "clip": "uniform"}
    z = from_threshold(moved, threshold, law.tau, names[law.name], weights)
    if law.name == "logistic":
        return logistic_logs(z)
    if law.name == "laplace":
        far = -z.abs()
        smaller, larger = far - LOG2, torch.log1p(-0.5 * torch.exp(far))
        return torch.where(z > 0, larger, smaller), torch.where(z > 0, smaller, larger)
    inside = (z > 0.0) & (z < 1.0)
    safe = torch.where(inside, z, 0.5)
    log_p = torch.where(inside, torch.log(safe), torch.where(z > 0.0, 0.0, -math.inf))
    return log_p, torch.where(inside, torch.log1p(-safe), torch.where(z > 0.0, -math.inf, 0.0))


def _threshold(x: Tensor, kept: Tensor, k: Tensor, weights: Tensor, law: Law) -> Tensor:
    """Return b, (B, 1), by bisection. The scores at which the cumulated weight reaches and passes k are `kept` and 0.

    With A the weight above `kept`, A < k, and C the weight from 0 upwards, C > k: the sum is at most k at
    kept + tau log(W / (k - A)) and at least k at -tau log(C / (C - k)), one more tau for a clipped membership.
    """
    wanted, w, tau = k.double()[:, None], weights.double(), law.tau
    above = torch.where(x > kept, w, 0.0).sum(1, keepdim=True)
    within = torch.where(x >= 0.0, w, 0.0).sum(1, keepdim=True)
    tiny = torch.finfo(torch.float64).tiny
    high = kept.double() + tau * (1.0 + torch.log(w.sum(1, keepdim=True) / (wanted - above).clamp_min(tiny)))
    low = -tau * (1.0 + torch.log(within / (within - wanted).clamp_min(tiny)))
    logs = w.log()
    for _ in range(100):
        middle = 0.5 * (low + high)
        z = (x.double() - middle) / tau
        if law.name == "clip":
            more = (w * z.clamp(0.0, 1.0)).sum(1, keepdim=True) >= wanted
        else:
            # The sum is k if what the items above b lack is what the others have. Far from all items both underflow,
            # so their logarithms are compared if the weight above b is k.
            inside, far = z > 0, -z.abs()
            small = logs + (logsigmoid(far) if law.name == "logistic" else far - LOG2)
            lacks = torch.logsumexp(torch.where(inside, small, -math.inf), 1, keepdim=True)
            has = torch.logsumexp(torch.where(inside, -math.inf, small), 1, keepdim=True)
            spare = torch.where(inside, w, 0.0).sum(1, keepdim=True) - wanted
            exact = spare.abs() <= 1e-12 * wanted
            more = torch.where(exact, has >= lacks, spare + has.exp() - lacks.exp() >= 0.0)
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    b = 0.5 * (low + high)
    if law.name == "clip":  # items that far apart are all in or out for every b between them
        b = torch.where(kept > tau, 0.5 * (kept.double() - tau), b)
    return b.to(x.dtype)


def weighted_true_items(labels: Tensor, positive: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the positive items whose label is among the k largest of the list, counted by weight, boolean (B, N).

    Labels tied at the boundary are all in.

    Args:
        labels: (B, N).
        positive: Boolean (B, N), the valid positive items.
        k: (B,), not negative.
        weights: (B, N).

    Example:
        >>> y, w = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[2.0, 1.0, 1.0]])
        >>> weighted_true_items(y, y > 0, torch.tensor([2.0]), w)
        tensor([[ True, False, False]])
    """
    ordered, order = torch.where(positive, labels, -math.inf).sort(dim=1, descending=True)
    summed = torch.where(positive, weights, 0.0).double().gather(1, order).cumsum(1)
    place = (summed < k.double()[:, None]).sum(1, keepdim=True)
    boundary = ordered.gather(1, place.clamp_max(labels.shape[1] - 1))
    return positive & ((labels >= boundary) | (place >= labels.shape[1])) & (k > 0)[:, None]
