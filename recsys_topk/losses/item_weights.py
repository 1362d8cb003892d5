"""Losses of lists of weighted items: an item of weight w counts as w copies of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recsys_topk.losses.skipped_lists import replace_skipped
from recsys_topk.numerics import SLACK, full_mask, is_full
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.losses.find_positives import find_positives

if TYPE_CHECKING:
    from recsys_topk.losses.base import RankingLoss


class WeightedItems:
    """Mixin of losses: the formula for lists of weighted items.

    Attributes:
        takes_item_weights: Whether `per_list` takes weights, or `per_list_weighted` is implemented.
        no_item_weights: Why it is not, for the error.
    """

    takes_item_weights: bool = False
    no_item_weights: str = ""

    def per_list_weighted(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Return the loss of each list of weighted items, (B,). Called as `per_list` is, if `takes_item_weights`.

        An item of weight w counts as w copies. The default is `per_list` with the weights as a further argument.

        Args:
            scores: (B, N), float32 or float64; 0 where masked.
            labels: (B, N), the dtype of scores; 0 where masked.
            mask: Boolean (B, N), the items that are not masked and have a weight above 0.
            k: (B,), the dtype of scores, or None; with `requires_k`, 0 < k < sum of the weights.
            weights: (B, N), the dtype of scores; 0 where masked.
        """
        found: Tensor = self.per_list(scores, labels, mask, k, weights)  # type: ignore[attr-defined]
        return found


def weighted_losses(
    loss: RankingLoss, x: Tensor, y: Tensor, mask: Tensor | None, k: int | Tensor | None, item_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of lists of weighted items, and which lists count, (B,) each.

    A list counts if it has a positive item of positive weight and, for a loss that requires k, 0 < k < sum of the
    weights.

    Args:
        loss: The loss.
        x: Scores, (B, N), float32 or float64.
        y: Labels, (B, N), the dtype of scores.
        mask: Boolean (B, N); None = all items are real.
        k: Overrides the k of the loss. ``"positives"`` = the weight of the positive items.
        item_weights: (B, N).
    """
    w = item_weights.detach().to(x.dtype)
    valid = w > 0 if mask is None else mask & (w > 0)
    if may_read(x) and bool(valid.all()):
        valid = full_mask(x)
    else:
        w = torch.where(valid, w, 0.0)
    positive, positives = find_positives(y, None if is_full(valid) else valid, loss.positive_above)
    counted = positives > 0
    chosen = loss.k if k is None else k
    ks: Tensor | None = None
    if isinstance(chosen, str):
        ks = torch.where(positive, w, 0.0).sum(1)
    elif chosen is not None:
        ks = chosen.to(x.dtype) if isinstance(chosen, Tensor) else x.new_full((len(x),), chosen)
    if loss.requires_k:
        ks = x.new_zeros(len(x)) + loss.require_k(ks)
        counted = counted & (ks > 0) & (ks < (1.0 - SLACK) * w.sum(1))
    if x.shape[1] == 0:
        return x.sum(-1) * 0.0, counted
    if x.shape[1] < 2:  # a formula may need two items
        wide = [torch.nn.functional.pad(one, (0, 1)) for one in (x, y, w)]
        valid = torch.nn.functional.pad(valid, (0, 1), value=False)
        x, y, w = wide
    if not is_full(valid):
        x, y = torch.where(valid, x, 0.0), torch.where(valid, y, 0.0)
    if not (may_read(x) and bool(counted.all())):
        x, y, valid, replaced = replace_skipped(x, y, valid, ks, counted, loss.positive_above)
        ks = replaced if isinstance(replaced, Tensor) else None
        w = torch.where(counted[:, None], w, 1.0)
    return loss.per_list_weighted(x, y, valid, ks, w), counted
