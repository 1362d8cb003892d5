"""Memberships of weighted items: an item of weight 2 counts as two copies, and sum_i w_i p_i = k."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from recsys_topk.numerics import LOG2
from recsys_topk.ops.selection.from_threshold import from_threshold
from recsys_topk.ops.selection.logistic import logistic_logs


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
    return (torch.where(share > 0, x, 0.0) * share).sum(1, keepdim=True) / share.sum(1, keepdim=True)


def weighted_logs(
    x: Tensor, k: Tensor, weights: Tensor, tau: float, law: Literal["logistic", "laplace", "uniform"]
) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 - p), p_i = F((x_i - b) / tau) with b such that sum_i w_i p_i = k, (B, N) each.

    Args:
        x: (B, N), -inf where masked.
        k: (B,), 0 < k < sum of the weights.
        weights: (B, N), 0 where masked.
        tau: Temperature.
        law: F: the logistic or the Laplace distribution function, or clip(z, 0, 1) (``"uniform"``).

    Example:
        >>> x, w = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[1.0, 2.0, 1.0]])
        >>> log_p, _ = weighted_logs(x, torch.tensor([1.5]), w, 1.0, "logistic")
        >>> (w * log_p.exp()).sum()
        tensor(1.5000)
    """
    kept, cut = (one.detach() for one in weighted_pair(x, k, weights))
    moved = x - cut
    z = from_threshold(moved, _threshold(moved.detach(), kept - cut, k, weights, tau, law), tau, law, weights)
    if law == "logistic":
        return logistic_logs(z)
    if law == "laplace":
        far = -z.abs()
        smaller, larger = far - LOG2, torch.log1p(-0.5 * torch.exp(far))
        return torch.where(z > 0, larger, smaller), torch.where(z > 0, smaller, larger)
    inside = (z > 0.0) & (z < 1.0)
    safe = torch.where(inside, z, 0.5)
    log_p = torch.where(inside, torch.log(safe), torch.where(z > 0.0, 0.0, -math.inf))
    return log_p, torch.where(inside, torch.log1p(-safe), torch.where(z > 0.0, -math.inf, 0.0))


def _threshold(x: Tensor, kept: Tensor, k: Tensor, weights: Tensor, tau: float, law: str) -> Tensor:
    """Return b, (B, 1), by bisection. The scores at which the cumulated weight reaches and passes k are `kept` and 0.

    With A the weight above `kept`, A < k, and C the weight from 0 upwards, C > k: the sum is at most k at
    kept + tau log(W / (k - A)) and at least k at -tau log(C / (C - k)), one more tau for a clipped membership.
    """
    wanted, w = k.double()[:, None], weights.double()
    above = torch.where(x > kept, w, 0.0).sum(1, keepdim=True)
    within = torch.where(x >= 0.0, w, 0.0).sum(1, keepdim=True)
    tiny = torch.finfo(torch.float64).tiny
    high = kept.double() + tau * (1.0 + torch.log(w.sum(1, keepdim=True) / (wanted - above).clamp_min(tiny)))
    low = -tau * (1.0 + torch.log(within / (within - wanted).clamp_min(tiny)))
    for _ in range(100):
        middle = 0.5 * (low + high)
        z = (x.double() - middle) / tau
        if law == "logistic":
            p = torch.sigmoid(z)
        elif law == "laplace":
            far = 0.5 * torch.exp(-z.abs())
            p = torch.where(z > 0, 1.0 - far, far)
        else:
            p = z.clamp(0.0, 1.0)
        more = (w * p).sum(1, keepdim=True) >= wanted
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return (0.5 * (low + high)).to(x.dtype)


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
