"""Lists in 1-D tensors, one after the other or mixed, converted to padded batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys_topk.checks import check_real, check_scores


class Bucket(NamedTuple):
    """Lists of similar length, as rows.

    Attributes:
        lists: (b,) int64, the indices of the lists.
        items: (b, n) int64, the positions of their items in the flat tensors; any position for padding.
        mask: Boolean (b, n), or None if the lists have n items each.
    """

    lists: Tensor
    items: Tensor
    mask: Tensor | None


class FlatLists(NamedTuple):
    """The positions of the items of each list in flat tensors.

    Attributes:
        lengths: (L,) int64 on the host, the number of items of each list.
        order: (T,) int64 on the device of the items, the items list by list; None = they are in that order already.
        device: Device of the items.
    """

    lengths: Tensor
    order: Tensor | None
    device: torch.device

    def empty(self) -> Tensor:
        """Return the indices of the lists without items, on the device."""
        return _sent((self.lengths == 0).nonzero()[:, 0], self.device)

    def buckets(self) -> Iterator[Bucket]:
        """Yield the lists that have items, in buckets of 1, 2, 3 to 4, 5 to 8, ... items.

        A row is padded to the longest list of its bucket, which is less than twice its own length.

        Example:
            >>> for bucket in FlatLists(torch.tensor([3, 1, 4]), None, torch.device("cpu")).buckets():
            ...     bucket.lists.tolist(), bucket.items.tolist()
            ([1], [[3]])
            ([0, 2], [[0, 1, 2, 0], [4, 5, 6, 7]])
        """
        starts = self.lengths.cumsum(0) - self.lengths
        # frexp: n - 1 = m 2^e with 1/2 <= m < 1, so that 2^(e-1) < n <= 2^e.
        size = torch.where(self.lengths > 0, torch.frexp((self.lengths - 1).double()).exponent, -1)
        for exponent in torch.unique(size).tolist():
            if exponent < 0:
                continue
            lists = (size == exponent).nonzero()[:, 0]
            lengths = self.lengths[lists]
            shortest, longest = int(lengths.min()), int(lengths.max())
            rows, own, first = _sent(torch.stack([lists, lengths, starts[lists]]), self.device)
            place = torch.arange(longest, device=self.device)
            mask = None if shortest == longest else place < own[:, None]
            items = first[:, None] + (place if mask is None else place * mask)
            yield Bucket(rows, items if self.order is None else self.order[items], mask)

    def collect(
        self,
        scores: Tensor,
        labels: Tensor,
        k: int | Tensor | None,
        weights: Tensor | None,
        function: Callable[..., tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of all lists and which lists count, (L,) each, in the order of the lists.

        Args:
            scores: (T,).
            labels: (T,).
            k: One int, or (L,).
            weights: (T,), weights of the items; None = 1 each.
            function: Takes scores, labels, mask, k and weights of a bucket; returns the losses, and which lists count
                (None = all). A list without items has loss 0 and does not count.
        """
        empty = self.empty()
        places, values = [empty], [scores.new_zeros(len(empty)) + scores[:0].sum()]
        counted = torch.zeros(len(self.lengths), dtype=torch.bool, device=scores.device)
        for rows, items, mask in self.buckets():
            # The backward of index_select is an index_add; the backward of x[items] sorts the indices first.
            batch = scores.index_select(0, items.flatten()).view_as(items)
            each, of_items = k[rows] if isinstance(k, Tensor) else k, None if weights is None else weights[items]
            losses, counts = function(batch, labels[items], mask, each, of_items)
            counted[rows] = True if counts is None else counts
            places.append(rows)
            values.append(losses)
        return torch.cat(values).index_select(0, torch.cat(places).argsort()), counted


def flat_lists(scores: Tensor, labels: Tensor, mask: Tensor | None, list_ids: Any, lengths: Any) -> FlatLists:
    """Check flat input and return its lists.

    Args:
        scores: (T,), floating.
        labels: (T,).
        mask: Must be None.
        list_ids: (T,) integers, the list of each item, in any order; or None.
        lengths: (L,) integers, the number of items of each list, list after list; or None.

    If `list_ids` or `lengths` is on the host, nothing is read from the device of the scores.

    Example:
        >>> x = torch.zeros(4)
        >>> flat_lists(x, x, None, torch.tensor([7, 3, 7, 7]), None)
        FlatLists(lengths=tensor([1, 3]), order=tensor([1, 0, 2, 3]), device=device(type='cpu'))
    """
    name = "lengths" if list_ids is None else "list_ids"
    if list_ids is not None and lengths is not None:
        raise ValueError("list_ids and lengths were both given; pass one of them")
    if mask is not None:
        raise ValueError(f"{name} and mask were both given; flat lists have no padding: leave masked items out")
    check_scores(scores)
    if scores.dim() != 1:
        raise ValueError(
            f"with {name}, scores must be 1-D, one per item, got shape {tuple(scores.shape)}; lists as rows take a mask"
        )
    if not isinstance(labels, Tensor) or labels.shape != scores.shape:
        given = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"with {name}, labels must be 1-D, one per item, ({len(scores)},), got {given}")
    check_real("labels", labels)
    if labels.device != scores.device:
        raise ValueError(f"labels are on {labels.device} and scores are on {scores.device}; move one to the other")
    if list_ids is not None:
        ids = _integers("list_ids", list_ids, scores.device)
        if ids.shape != scores.shape:
            raise ValueError(f"list_ids must be one per item, ({len(scores)},), got {tuple(ids.shape)}")
        ordered, order = ids.sort(stable=True)
        # This waits for a device: the number of lists and their lengths are read from it.
        counts = torch.unique_consecutive(ordered, return_counts=True)[1].cpu()
        return FlatLists(counts, _sent(order, scores.device), scores.device)
    counts = _integers("lengths", lengths, scores.device).cpu().long()
    if counts.dim() != 1 or bool((counts < 0).any()) or int(counts.sum()) != len(scores):
        raise ValueError(
            f"lengths must be 1-D, not negative and sum to the {len(scores)} items of scores, "
            f"got shape {tuple(counts.shape)} with sum {int(counts.sum())}"
        )
    return FlatLists(counts, None, scores.device)


def _integers(name: str, values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    found = values if isinstance(values, Tensor) else torch.as_tensor(values)
    if found.numel() == 0 and not isinstance(values, Tensor):
        found = found.long()
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {found.dtype}")
    if found.device.type != "cpu" and found.device != device:
        raise ValueError(f"{name} is on {found.device} and scores are on {device}; move it there, or to the CPU")
    return found


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for the device."""
    if x.device == device:
        return x
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
