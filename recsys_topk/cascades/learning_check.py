"""Check of the first training batches: fail early if the loss would skip every list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsys_topk.datamodules.batch import CascadeBatch

BATCHES = 100


class LearningCheck:
    """Counts lists with a positive in the first batches on the device, and raises if the loss would skip all of them.

    Args:
        positive_above: Items with a label above this are positive.
        cuts: The cut-off of the term of each stage (`CascadeObjective.cuts`); empty = no cut-off.
        quotas: Number of items that each stage passes on, for the message.
    """

    def __init__(self, positive_above: float, cuts: Sequence[int], quotas: Sequence[int]) -> None:
        self.positive_above = positive_above
        self.cut = min(cuts) if cuts else None
        self.quotas = list(quotas)
        self._seen: list[torch.Tensor] = []

    def add(self, batch: CascadeBatch) -> bool:
        """Count a batch, without a read on the host. Return whether enough batches were counted for `finish`."""
        items = batch.mask & (batch.labels > self.positive_above)
        longest = batch.mask.sum(-1).amax() if batch.size else batch.mask.sum()
        self._seen.append(torch.stack((items.any(-1).sum(), longest)))
        return len(self._seen) >= BATCHES

    def finish(self) -> None:
        """Raise ValueError if the loss would skip all counted lists. Reads the counts on the host once."""
        if not self._seen:
            return
        counts = torch.stack(self._seen).cpu()
        lists, longest = int(counts[:, 0].sum()), int(counts[:, 1].max())
        if lists == 0:
            raise ValueError(
                f"no list of the first {len(counts)} training batches has a label above {self.positive_above:g}, so "
                f"the loss has no positives; check the labels, or set positive_above of the data or the loss "
                f"(--loss.positive_above)"
            )
        if self.cut is not None and longest <= self.cut:
            raise ValueError(all_selected_message(self.cut, longest, self.quotas))


def all_selected_message(cut: int, longest: int, quotas: Sequence[int]) -> str:
    """Return the error message for lists that are not longer than the cut-off, so that every item is selected."""
    return (
        f"the loss selects the best {cut} items of each list, but training lists have at most {longest} items, so "
        f"every item is selected and nothing is learned (quotas {list(quotas)}); use a smaller --model.k, or longer "
        f"lists (--data.train_negatives)"
    )
