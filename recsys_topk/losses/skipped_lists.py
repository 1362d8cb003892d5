"""Which lists a loss counts, and the warning for a batch in which it skipped every list."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.losses.find_positives import find_positives
from recsys_topk.ops.selection.count_true import count_true

if TYPE_CHECKING:
    from recsys_topk.losses.base import RankingLoss


def count_lists(
    loss: RankingLoss, labels: Tensor, mask: Tensor | None, k: int | Tensor | None
) -> tuple[int | Tensor | None, Tensor | None]:
    """Return the cut-off of each list, and which lists `loss` counts, boolean (B,); None = all.

    Args:
        loss: The loss.
        labels: (B, N), float32 or float64.
        mask: Boolean (B, N); None = all items are real.
        k: Overrides the k of the loss.
    """
    positives = find_positives(labels, mask, loss.positive_above)[1]
    chosen = loss.k if k is None else k
    cut = positives if isinstance(chosen, str) else chosen
    proper = None
    if loss.requires_k:
        cut, proper = _cap(loss.require_k(cut), labels, None if mask is None else count_true(mask))
    readable = may_read(labels)
    if proper is None and readable and bool(positives.all()):
        return cut, None
    counted = positives > 0 if proper is None else (positives > 0) & proper
    return cut, None if readable and bool(counted.all()) else counted


def _cap(k: int | Tensor, labels: Tensor, items: Tensor | None) -> tuple[int | Tensor, Tensor | None]:
    """Return k capped at the number of valid items, and the lists with 0 < k < valid items (None = all)."""
    if not isinstance(k, Tensor):
        least = labels.shape[1] if items is None else int(items.min()) if may_read(items) and len(items) else 0
        if 0 < k < least:
            return k, None
    if items is None:
        items = torch.full(labels.shape[:1], labels.shape[1], device=labels.device)
    wanted = torch.minimum(k.long() if isinstance(k, Tensor) else torch.full_like(items, k), items)
    return wanted, (wanted > 0) & (wanted < items)


def replace_skipped(
    scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, counted: Tensor, positive_above: float
) -> tuple[Tensor, Tensor, Tensor, int | Tensor | None]:
    """Replace skipped lists by one that every formula accepts: equal scores, one positive item, k = 1."""
    row = counted[:, None]
    dummy = torch.zeros_like(labels)
    dummy[:, :1] = max(positive_above, 0.0) + 1.0
    if not is_full(mask):
        mask = mask | ~row
    if isinstance(k, Tensor):
        k = torch.where(counted, k, 1)
    return torch.where(row, scores, 0.0), torch.where(row, labels, dummy), mask, k


def warn_all_skipped(
    loss: RankingLoss, batches: int, labels: Tensor, longest: int, positives: Tensor, stacklevel: int
) -> None:
    """Warn that every list of a batch was skipped, if this is the first, 10th, 100th, ... such batch.

    Args:
        loss: The loss.
        batches: Number of such batches.
        labels: See `explain_skipped_lists`.
        longest: See `explain_skipped_lists`.
        positives: See `explain_skipped_lists`.
        stacklevel: See `warnings.warn`.
    """
    if batches != 10 ** (len(str(batches)) - 1):
        return
    which = "a batch" if batches == 1 else f"{batches} batches"
    message = f"{type(loss).__name__} skipped every list of {which}: the loss and its gradients are 0"
    reasons = explain_skipped_lists(labels, longest, positives, loss.positive_above)
    later = f"The next warning is after {10 * batches} such batches"
    warnings.warn(f"{message}. {reasons}. {later}", stacklevel=stacklevel + 1)


def explain_skipped_lists(labels: Tensor, longest: int, positives: Tensor, positive_above: float) -> str:
    """Return why every list of a batch was skipped, and how to fix it. Reads the tensors.

    Args:
        labels: The labels of the valid items, any shape.
        longest: Number of items of the longest list.
        positives: (B,), the number of valid positive items. Lists with a positive item were skipped because of k.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> print(explain_skipped_lists(torch.zeros(2, 3), 3, torch.tensor([0, 0]), 0.0))
        2 of 2 lists have no valid label above positive_above = 0 (the largest is 0): check the labels, or lower
        positive_above
    """
    lists, without = len(positives), int((positives == 0).sum())
    reasons = []
    if without:
        largest = f"the largest is {float(labels.max()):g}" if labels.numel() else "no item is valid"
        reasons.append(
            f"{without} of {lists} lists have no valid label above positive_above = {positive_above:g} ({largest}): "
            "check the labels, or lower positive_above"
        )
    if without < lists:
        reasons.append(
            f"{lists - without} of {lists} lists have no item beyond the k-th (the longest has {longest} items): "
            f"choose 1 <= k < {longest}"
        )
    return "; ".join(reasons)
