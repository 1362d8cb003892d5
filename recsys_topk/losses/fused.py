"""The fused operation that computes a loss, if there is one.

A fused operation computes a whole batch in one pass, with masks, skipped lists and gradients (`recsys_topk.ops`). It
computes a *law*: a membership and its cross-entropy. Operators and losses that have one say so with a method `law`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

from recsys_topk.ops.losses.topk_loss import topk_loss
from recsys_topk.ops.selection.membership import Law

if TYPE_CHECKING:
    from recsys_topk.losses.base import RankingLoss


def law_of(loss: RankingLoss) -> Law | None:
    """Return the law that a loss computes; None = no fused operation computes it.

    Example:
        >>> from recsys_topk import losses
        >>> law_of(losses.get("lapsum", tau=2.0)), law_of(losses.get("softmax"))
        (Law(name='laplace', tau=2.0, alpha=0.5, others=1.0), None)
    """
    law = getattr(loss, "law", None)
    found: Law | None = None if law is None else law()
    return found


def fused_losses(
    loss: RankingLoss,
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    k: int | Tensor | None,
    mean: bool,
    item_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the losses of lists and which lists count (None = all), (B,) each, from a fused operation.

    Args:
        loss: The loss.
        scores: (B, N), float32 or float64; masked places may hold anything.
        labels: (B, N), the dtype of scores.
        mask: Boolean (B, N); None = all items are real.
        k: Overrides the k of the loss.
        mean: Return the mean over the lists that count instead of the losses.
        item_weights: (B, N); None = 1. The operation then also computes lists without a kernel.

    Returns:
        None if no fused operation supports the loss or the arguments.
    """
    law = law_of(loss)
    if law is None or (item_weights is None and scores.shape[1] < 2):
        return None
    chosen = loss.k if k is None else k
    wanted = None if isinstance(chosen, str) else loss.require_k(chosen)
    if item_weights is not None:
        if scores.shape[1] < 2:  # a single item may be selected in part
            scores, labels, item_weights = (pad(x, (0, 2)) for x in (scores, labels, item_weights))
            mask = None if mask is None else pad(mask, (0, 2), value=False)
        return topk_loss(scores, labels, mask, wanted, loss.positive_above, law, mean, item_weights)
    arguments = (scores, labels, mask, wanted, loss.positive_above, law, mean)
    kernel = topk_loss.implementation_for(*arguments)
    return None if kernel is None else kernel.function(*arguments)
