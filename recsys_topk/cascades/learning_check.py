"""Notices in the first batches that nothing can be learned from the data, instead of reporting a falling loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_topk.datamodules.batch import CascadeBatch

BATCHES = 100


class LearningCheck:
    """Counts on the device what the first batches offer, and raises once if it is nothing.

    Args:
        positive_above: Items with a label above this are positive.
        cuts: Where the terms of the stages cut their lists (`CascadeObjective.cuts`); empty if they do not.
        quotas: How many items each stage passes on, for the message.
    """

    def __init__(self, positive_above: float, cuts: Sequence[int], quotas: Sequence[int]) -> None:
        self.positive_above = positive_above
        self.cut = min(cuts) if cuts else None
        self.quotas = list(quotas)
        self._seen: list[torch.Tensor] = []

    def add(self, batch: CascadeBatch) -> bool:
        """Count a batch; return whether there have been enough to call `finish`. Nothing is read on the host."""
        items = batch.mask & (batch.labels > self.positive_above)
        longest = batch.mask.sum(-1).amax() if batch.size else batch.mask.sum()
        self._seen.append(torch.stack((items.any(-1).sum(), longest)))
        return len(self._seen) >= BATCHES

    def finish(self) -> None:
        """Raise ValueError if the batches counted cannot teach anything. Reads the counts, once."""
        if not self._seen:
            return
        counts = torch.stack(self._seen).cpu()
        lists, longest = int(counts[:, 0].sum()), int(counts[:, 1].max())
        if lists == 0:
            raise ValueError(
                f"no list of the first {len(counts)} training batches has a label above {self.positive_above:g}, so "
                f"nothing is learned; check the labels, or set positive_above of the data or the loss "
                f"(--loss.positive_above)"
            )
        if self.cut is not None and longest <= self.cut:
            raise ValueError(covers(self.cut, longest, self.quotas))


def covers(cut: int, longest: int, quotas: Sequence[int]) -> str:
    """Return what to say if every list is no longer than what is selected from it."""
    return (
        f"the loss selects the best {cut} of each list and training lists have at most {longest} items, so every item "
        f"is selected and nothing is learned (quotas {list(quotas)}); use a smaller --model.k, or longer lists "
        f"(--data.train_negatives)"
    )
