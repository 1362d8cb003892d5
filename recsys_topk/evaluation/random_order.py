"""Expected metrics of a uniformly random order over a whole catalogue."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.evaluation.search import Requests
from recsys_topk.ops.losses.dcg import rank_discounts


def random_recall(
    requests: Requests, items: Tensor, *, k: int, m: int, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the expected recall@k@m of a uniformly random order, per request.

    Let a be the number of positives above the boundary label of the true top k, L the number of positives with the
    boundary label, w = min(k, positives), and X the number of the L items among the first m of n, which is
    hypergeometric. Then E = (a m / n + E[min(X, w - a)]) / w.

    Args:
        requests: The requests.
        items: (B,) int64, the number n of candidates of each request.
        k: Size of the true set.
        m: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Returns:
        The recall, float64 (B,), and which requests have a positive, boolean (B,).
    """
    positive = requests.mask & (requests.labels > positive_above)
    true_size = positive.sum(1).clamp_max(k)
    ordered = torch.where(positive, requests.labels.double(), -torch.inf).sort(1, descending=True).values
    if not ordered.shape[1]:
        return torch.zeros_like(true_size, dtype=torch.float64), true_size > 0
    boundary = ordered.gather(1, (true_size - 1).clamp_min(0)[:, None])
    above = (positive & (requests.labels > boundary)).sum(1)
    tied = (positive & (requests.labels == boundary)).sum(1)
    n, drawn = items.double(), items.clamp_max(m).double()
    x = torch.arange(ordered.shape[1] + 1, device=items.device, dtype=torch.float64)
    tied_, n_, m_ = tied.double()[:, None], n[:, None], drawn[:, None]
    possible = (x <= tied_) & (x <= m_) & (m_ - x <= n_ - tied_)
    log_p = _log_choose(tied_, x) + _log_choose(n_ - tied_, m_ - x) - _log_choose(n_, m_)
    probability = torch.where(possible, log_p, -torch.inf).exp()
    hits = (probability * torch.minimum(x, (true_size - above).double()[:, None])).sum(1)
    expected = above * drawn / n.clamp_min(1) + hits
    return torch.where(true_size > 0, expected / true_size.clamp_min(1), 0.0), true_size > 0


def random_ndcg(gains: Tensor, items: Tensor, k: int) -> Tensor:
    """Return the expected DCG@k of a uniformly random order: sum_{r <= min(k, n)} D(r) times the mean gain, (B,).

    Args:
        gains: (B, N), gains of the items of each list, 0 where masked; all other items have gain 0.
        items: (B,) int64, the number n of candidates of each request.
        k: Cut-off.
    """
    discounts = rank_discounts(k, items, gains).sum(-1)
    return gains.sum(1) / items.clamp_min(1) * discounts


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Return log(n choose k). The value is undefined where k is not in 0..n."""
    inside = (k >= 0) & (k <= n)
    n, k = torch.where(inside, n, 0.0), torch.where(inside, k, 0.0)
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
