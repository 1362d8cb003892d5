"""The message for a batch in which a loss skipped every list."""

from __future__ import annotations

from torch import Tensor


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
