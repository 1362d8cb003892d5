"""SoftSort: the mass that an item has in the first k rows of a relaxed permutation matrix."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from recsys_topk.numerics import count_true, fill_masked, is_full, log1mexp
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.operators.ordering import share_ties, sort_descending


class SoftSort(TopKOperator):
    """Top-k mass of SoftSort's relaxed permutation, without its n x n matrix.

    Row r is softmax_i(-|x_i - x_[r]| / tau); U_i is the mass of item i in rows 1..k, D_i in the rows after. Rows sum
    to 1, columns do not. Two forms:

    - normalised (the default, and what the loss uses): p = U / C and 1 - p = D / C with C = U + D held constant, so
      that log p and log(1 - p) carry the gradients of U and of D (the form of LCRON). Needs all rows: O(n log n).
    - plain: p = U, which sums to k and may exceed 1; log(1 - p) is -inf, with zero gradient, where it does. Needs
      the first k rows: O(n + k log k).

    In the order of the scores |x_i - x_[r]| splits into two one-sided sums, so that every normaliser and every mass
    is a cumulative log-sum-exp (taken in float64: its terms cancel); time n log n and memory n, not n^2.

    Args:
        tau: Temperature.
        normalised: Which form.
        validate: Raise on NaN or infinity among valid scores.

    Example:
        >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> SoftSort(normalised=False)(x, k=2).p.round(decimals=3)
        tensor([[0.8410, 0.2840, 0.7710, 0.1040]])
        >>> SoftSort()(x, k=2).p.round(decimals=3)
        tensor([[0.8900, 0.2690, 0.7310, 0.1100]])
    """

    name: ClassVar[str] = "softsort"
    cost: ClassVar[str] = "n log n"
    sums_to_k: ClassVar[bool] = False
    exact_gradient: ClassVar[bool] = False
    paper: ClassVar[str] = "Prillo and Eisenschlos 2020, arXiv 2006.16038"

    def __init__(self, tau: float = 1.0, normalised: bool = True, *, validate: bool = False) -> None:
        super().__init__(tau, validate=validate)
        self.normalised = normalised

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        full = is_full(mask)
        x = share_ties(scores if full else fill_masked(scores, mask, -math.inf)) / self.tau
        if not self.normalised and not isinstance(k, Tensor):
            return _plain_of_top(x, k, mask)
        _, order = sort_descending(x)
        v = x.gather(1, order).double()
        ranks = torch.arange(1, x.shape[1] + 1, device=x.device)
        valid = None if full else ranks <= count_true(mask)[:, None]
        log_z, v = _log_normalisers(v, valid, None)
        first = ranks <= (k[:, None] if isinstance(k, Tensor) else k)
        log_u = _log_masses(v, log_z, first if valid is None else first & valid)[0]
        back = torch.empty_like(order).scatter_(1, order, ranks.expand_as(order) - 1)
        if not self.normalised:
            log_p = log_u.gather(1, back).to(x.dtype)
            return SoftSelection(log_p, log1mexp(log_p.clamp_max(0.0)), mask)
        log_d = _log_masses(v, log_z, ~first if valid is None else ~first & valid)[0]
        log_c = torch.logaddexp(log_u, log_d).detach()
        return SoftSelection(
            (log_u - log_c).gather(1, back).to(x.dtype), (log_d - log_c).gather(1, back).to(x.dtype), mask
        )

    def extra_repr(self) -> str:
        """Show the temperature and the form."""
        return super().extra_repr() + ("" if self.normalised else ", normalised=False")


def _plain_of_top(x: Tensor, k: int, mask: Tensor) -> SoftSelection:
    """Return the plain form from the k largest scores: the rest enters through one log-sum-exp."""
    top, places = x.topk(k, dim=1)
    centre = top[:, :1].detach()
    rest = (x - centre).scatter(1, places, -math.inf)
    log_rest = torch.logsumexp(rest, 1, keepdim=True).double()
    log_z, v = _log_normalisers((top - centre).double(), None, log_rest)
    log_top, log_all = _log_masses(v, log_z, None)
    log_p = (rest + log_all.to(x.dtype)).scatter(1, places, log_top.to(x.dtype))
    return SoftSelection(log_p, log1mexp(log_p.clamp_max(0.0)), mask)


def _log_normalisers(v: Tensor, valid: Tensor | None, log_rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log Z of each row of the relaxed permutation, and the values with 0 where they are not valid.

    Z_r = e^{v_r} sum_{i <= r} e^{-v_i} + e^{-v_r} sum_{i > r} e^{v_i}.

    Args:
        v: (B, m), descending.
        valid: Boolean (B, m), a prefix of each row; None = all.
        log_rest: (B, 1), log of the sum of e^x over the items that are not in `v`; None = there are none.
    """
    if valid is not None:
        v = torch.where(valid, v, 0.0)
    up = torch.logcumsumexp(-v if valid is None else torch.where(valid, -v, -math.inf), 1)
    down = _after(v if valid is None else torch.where(valid, v, -math.inf))
    if log_rest is not None:
        down = torch.logaddexp(down, log_rest)
    return torch.logaddexp(v + up, down - v), v


def _log_masses(v: Tensor, log_z: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return log of the mass of each item of `v` in `rows`, (B, m), and the log factor of all smaller items, (B, 1)."""
    rising, falling = -v - log_z, v - log_z
    if rows is not None:
        rising, falling = torch.where(rows, rising, -math.inf), torch.where(rows, falling, -math.inf)
    before = torch.logcumsumexp(rising, 1)
    return torch.logaddexp(v + before, _after(falling) - v), before[:, -1:]


def _after(x: Tensor) -> Tensor:
    """Return log of the sum of e^x over the entries after each, along rows; -inf for the last."""
    reverse = torch.logcumsumexp(x.flip(1), 1).flip(1)
    return torch.cat([reverse[:, 1:], torch.full_like(reverse[:, :1], -math.inf)], 1)
