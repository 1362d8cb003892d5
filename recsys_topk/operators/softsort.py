"""SoftSort: the mass of an item in the first k rows of a relaxed permutation matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_not_negative
from recsys_topk.numerics import LOWEST_EXPONENT, add_eps, is_full, log1mexp
from recsys_topk.operators.base import OperatorOptions, SoftSelection, TopKOperator
from recsys_topk.operators.score_scale import Tau
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.scan import scan
from recsys_topk.ops.selection.sorting import share_ties, sort_descending


class SoftSort(TopKOperator):
    """Top-k mass of SoftSort's relaxed permutation, without its n x n matrix.

    Row r is softmax_i(-|x_i - x_[r]| / tau); U_i is the mass of item i in rows 1..k, D_i in the rows after k. Rows sum
    to 1, columns do not. There are two forms:

    - normalised (the default, used by the loss): p = U / C and 1 - p = D / C with C = U + D held constant, so that
      log p and log(1 - p) have the gradients of log U and log D (the form of LCRON). Needs all rows: O(n log n).
    - plain: p = U, which sums to k and may exceed 1; log(1 - p) is then -inf with zero gradient. Needs the first k
      rows: O(n + k log k).

    On sorted scores, sums over |x_i - x_[r]| split into two one-sided sums. Each is a recurrence
    s_i = e_i s_{i-1} + w_i with e_i = exp(-(gap to the neighbour) / tau) <= 1. All terms are positive and none is
    large, so there is no cancellation, overflow or underflow. Time is n log n (the sort) and memory n instead of n^2.

    Args:
        tau: Temperature.
        normalised: True = the normalised form, False = the plain form.
        eps: Added to C in the normalised form (LCRON's published loss has 1e-6).
        options: See `TopKOperator`.

    Example:
        >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> SoftSort(normalised=False)(x, k=2).p.round(decimals=3)
        tensor([[0.8410, 0.2840, 0.7710, 0.1040]])
        >>> SoftSort()(x, k=2).p.round(decimals=3)
        tensor([[0.8900, 0.2690, 0.7310, 0.1100]])
    """

    name, cost = "softsort", "n log n"
    sums_to_k = False
    exact_gradient = False
    loss_leaves_out = ("normalised",)
    paper = "Prillo and Eisenschlos 2020, arXiv 2006.16038"

    def __init__(
        self, tau: Tau = 1.0, normalised: bool = True, eps: float = 0.0, **options: Unpack[OperatorOptions]
    ) -> None:
        super().__init__(tau, **options)
        self.normalised = normalised
        self.eps = check_not_negative("eps", eps)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        full = is_full(mask)
        filled = scores if full else fill_masked(scores, mask, -math.inf)
        x = share_ties(filled)
        if not self.normalised and not isinstance(k, Tensor):
            return _plain_of_top(x, k, mask, self.tau)
        _, order = sort_descending(x)
        places = torch.arange(x.shape[1], device=x.device).expand_as(order)
        back = torch.empty_like(order).scatter(1, order, places)
        ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=x.device)
        v = x.gather(1, order)
        if not full:  # masked items come last; they become copies of the last valid item, so that there is no gap
            count = count_true(mask)[:, None]
            v = torch.where(places < count, v, v.gather(1, count - 1).detach())
        else:
            count = torch.full_like(ks, x.shape[1])[:, None]
        inside = (places < count).to(x.dtype)
        own, last, first = _masses(v, inside, torch.zeros_like(v[:, :1]), ks, self.tau)
        # An item has its own mass on its own side of k. On the other side it has the mass of the nearest row, reduced
        # by the distance to that row. Differences are taken before the division by tau, which would round large scores.
        edge = ks[:, None] - 1
        above = places <= edge
        log_u = torch.where(above, own.log(), last.log() + (v - v.gather(1, edge)) / self.tau)
        if not self.normalised:
            log_p = log_u.gather(1, back)
            return SoftSelection(log_p, log1mexp(log_p.clamp_max(0.0)), mask)
        log_d = torch.where(above, first.log() + (v.gather(1, edge + 1) - v) / self.tau, own.log())
        log_c = add_eps(torch.logaddexp(log_u, log_d).detach(), self.eps)
        return SoftSelection((log_u - log_c).gather(1, back), (log_d - log_c).gather(1, back), mask)

    def extra_repr(self) -> str:
        """Show the temperature and the form."""
        return super().extra_repr() + ("" if self.normalised else ", normalised=False")


def _plain_of_top(x: Tensor, k: int, mask: Tensor, tau: float) -> SoftSelection:
    """Return the plain form from the k largest scores. All other scores enter through one sum."""
    v, places = x.topk(k, dim=1)
    edge = v[:, -1:]
    rest = ((x - edge) / tau).scatter(1, places, -math.inf)
    below = torch.exp(torch.logsumexp(rest, 1, keepdim=True))
    ks = torch.full(x.shape[:1], k, device=x.device)
    own, last, _ = _masses(v, torch.ones_like(v), below, ks, tau)
    log_p = (rest + last.log()).scatter(1, places, own.log())
    return SoftSelection(log_p, log1mexp(log_p.clamp_max(0.0)), mask)


def _masses(v: Tensor, inside: Tensor, below: Tensor, k: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mass of each item in the rows on its own side of k, from the sorted scores, and two masses at k.

    With e_i = exp((v_i - v_{i-1}) / tau): up_i = 1 + e_i up_{i-1} is the sum of the weights of items 1..i in row i, and
    down_i = e_{i+1} (1 + down_{i+1}) is the sum of the weights of the items after i; Z = up + down.
    F_i = 1 / Z_i + e_i F_{i-1} and H_i = e_{i+1} (1 / Z_{i+1} + H_{i+1}) then sum the rows before and after i. Both
    recurrences restart at k.

    Args:
        v: (B, m), descending.
        inside: (B, m), 1 for valid items, 0 for masked items.
        below: (B, 1), the sum of exp((x - v_m) / tau) over the items that are not in `v`.
        k: (B,), 1 <= k <= m.
        tau: Temperature.

    Returns:
        The masses, (B, m), the mass of rows 1..k at item k, and that of the other rows at item k + 1, (B, 1).
    """
    gaps = torch.exp(((v[:, 1:] - v[:, :-1]) / tau).clamp_min(LOWEST_EXPONENT[v.dtype]))
    nothing = torch.zeros_like(below)
    e = torch.cat((nothing, gaps), 1)
    after = torch.cat((gaps, torch.ones_like(below)), 1)  # e_{i+1}
    up = scan(e, inside)
    down = scan(after, torch.cat((inside[:, 1:], below), 1) * after, reverse=True)
    w = inside / (up + down)
    # Both recurrences restart at k: no value is carried over.
    edge, ends = k[:, None], torch.arange(v.shape[1], device=v.device)
    e_cut, after_cut = torch.where(ends == edge, 0.0, e), torch.where(ends == edge - 1, 0.0, after)
    ahead = scan(e_cut, w)
    behind = scan(after_cut, after_cut * torch.cat((w[:, 1:], nothing), 1), reverse=True)
    behind = torch.cat((behind[:, :-1], nothing), 1)
    first = (w + behind).gather(1, edge.clamp_max(v.shape[1] - 1))
    return ahead + behind, ahead.gather(1, edge - 1), first
