"""Soft memberships of the top k that have compiled kernels. This is their one definition in torch."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.clip import clip_logs, clip_threshold
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.from_threshold import from_threshold
from recsys_topk.ops.selection.kth_pair import kth_pair, with_shared_gradient
from recsys_topk.ops.selection.laplace import laplace_logs, laplace_threshold
from recsys_topk.ops.selection.logistic import logistic_logs, logistic_threshold
from recsys_topk.ops.selection.weighted import balance, weighted_pair

LawName = Literal["dftopk", "logistic", "laplace", "clip", "fenchel_young"]

# A cross-entropy replaces memberships of exactly 0 and 1 by this and one minus this.
CLAMP = 1e-6


class Law(NamedTuple):
    """A membership and its loss.

    Attributes:
        name: ``"dftopk"``, ``"logistic"`` (sums to k), ``"laplace"``, ``"clip"``: the cross-entropy of that membership;
            ``"fenchel_young"``: the Fenchel-Young loss of ``"clip"``, with the number of true items as k.
        tau: Temperature.
        alpha: Only for ``"dftopk"``: where the threshold lies between x_[k+1] (0) and x_[k] (1).
        others: Weight of the items that are not true in the mean of a cross-entropy; 0 = the mean of -log p over the
            true items, with the threshold as the only effect of the others.
    """

    name: LawName
    tau: float
    alpha: float = 0.5
    others: float = 1.0


def membership_logs(
    scores: Tensor,
    k: int | Tensor,
    mask: Tensor,
    law: Law,
    taus: Tensor | None = None,
    item_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 - p) of the membership of a law, (B, N) each, differentiable.

    With u = (x - b) / tau:

    - ``dftopk``: p = sigmoid(u), b = alpha x_[k] + (1 - alpha) x_[k+1];
    - ``logistic``: p = sigmoid(u), ``laplace``: p = F(u), F the Laplace distribution function, and ``clip`` and
      ``fenchel_young``: p = clip(u, 0, 1), with b such that the memberships of a list sum to k.

    With weights the sum is sum_i w_i p_i, and x_[k] and x_[k+1] are those of `weighted_pair`.

    Args:
        scores: (B, N), 0 where masked.
        k: One int, or (B,), with 1 <= k < number of valid items; for ``"laplace"`` also fractions above 0.
        mask: Boolean (B, N).
        law: The law.
        taus: Only for ``"logistic"``: one temperature per list, (B, 1), constants for the gradient; None = `law.tau`.
        item_weights: (B, N), at least 0, constants for the gradient; None = 1. Then 0 < k < sum of the weights, and k
            may be a fraction.
    """
    if item_weights is not None:
        return _weighted_logs(scores, k, torch.where(mask, item_weights, 0.0).to(scores.dtype).detach(), law, taus)
    tau = law.tau
    if law.name == "dftopk":
        kept, cut = kth_pair(scores, k, mask)
        return logistic_logs((scores - (cut + law.alpha * (kept - cut))) / tau)
    filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
    ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
    x, gap = centred(filled, ks)
    if law.name == "logistic":
        each = torch.full_like(gap, tau) if taus is None else taus.detach()
        return logistic_logs(from_threshold(x, logistic_threshold(x.detach(), gap, ks, each), each, "logistic"))
    if law.name == "laplace":
        return laplace_logs(x, laplace_threshold(x.detach(), gap, ks, tau), tau)
    return clip_logs(x, clip_threshold(x.detach() / tau, gap / tau, ks), tau)


def _weighted_logs(
    scores: Tensor, k: int | Tensor, weights: Tensor, law: Law, taus: Tensor | None
) -> tuple[Tensor, Tensor]:
    tau: Tensor | float = law.tau if taus is None else taus.detach()
    ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
    filled = torch.where(weights > 0, scores, -math.inf)
    kept, cut = weighted_pair(filled, ks, weights)
    if law.name == "dftopk":
        kept, cut = (with_shared_gradient(one, filled, weights) for one in (kept, cut))
        return logistic_logs((scores - (cut + law.alpha * (kept - cut))) / tau)
    x, gap = filled - cut, (kept - cut) / tau
    z = x.detach() / tau
    if law.name == "logistic":
        return logistic_logs(
            from_threshold(x, balance(z, gap, ks, weights, "logistic") * tau, tau, "logistic", weights)
        )
    if law.name == "laplace":
        return laplace_logs(x, balance(z, gap, ks, weights, "laplace") * tau, law.tau, weights)
    return clip_logs(x, clip_threshold(z, gap, ks, weights), law.tau, weights)
