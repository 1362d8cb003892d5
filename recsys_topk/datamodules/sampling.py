"""Draw different items for every list, none of them its own: uniformly, or as often as they occur."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from recsys_topk.datamodules.draws import exponentials, integers

_ROUNDS: Final = 4
"""Rounds of drawing, each twice as long as the previous one; lists that are still short are filled by `_race`."""


class Source(Protocol):
    """Something to draw from: `tickets` equally likely numbers, each standing for one of `size` items."""

    @property
    def size(self) -> int:
        """Number of items."""

    @property
    def tickets(self) -> int:
        """Number of tickets."""

    def item(self, ticket: Tensor) -> Tensor:
        """Return the item that each ticket stands for."""

    def weight(self) -> Tensor:
        """Return how many tickets each item has, (size,)."""


@dataclass(frozen=True)
class Uniform:
    """Every item has one ticket."""

    size: int
    device: torch.device

    @property
    def tickets(self) -> int:
        """As many as items."""
        return self.size

    def item(self, ticket: Tensor) -> Tensor:
        """Return the ticket itself."""
        return ticket

    def weight(self) -> Tensor:
        """Return ones."""
        return torch.ones(self.size, device=self.device)


@dataclass(frozen=True)
class Occurrences:
    """Every occurrence of an item in a list is a ticket, so items are drawn in proportion to how often they occur."""

    occurrences: Tensor
    size: int

    @property
    def tickets(self) -> int:
        """As many as occurrences."""
        return self.occurrences.numel()

    def item(self, ticket: Tensor) -> Tensor:
        """Return the item that occurs there."""
        return self.occurrences.take(ticket).long()

    def weight(self) -> Tensor:
        """Return the occurrences of each item."""
        return torch.bincount(self.occurrences, minlength=self.size).float()


@dataclass(frozen=True)
class Drawn:
    """What `draw_distinct` found.

    Attributes:
        items: (B, n) items, 0 where nothing could be drawn.
        mask: (B, n) boolean, True = an item was drawn; a list's items come first.
        drawn: Scalar, draws looked at.
        rejected: Scalar, how many of them were the list's own or repeated.
    """

    items: Tensor
    mask: Tensor
    drawn: Tensor
    rejected: Tensor


def draw_distinct(source: Source, keys: Tensor, own: Tensor, own_mask: Tensor, number: int) -> Drawn:
    """Draw `number` different items for each list, none of them its own.

    A list accepts its draws in order and rejects own items and repeats. What it gets is a function of its key, its own
    items and the source, whatever lists it stands beside. Where rejection would take long (own items and repeats are
    most of the source), the remaining places go to the winners of an exponential race over all items, which has the
    same distribution. Where fewer than `number` items remain, the rest is masked.

    Cost: O(B (N + n) log(N + n)) time, O(B (N + n)) memory.

    Args:
        source: What to draw from.
        keys: (B,) from `request_keys`.
        own: (B, N) items of each list.
        own_mask: (B, N) boolean, True = a real item.
        number: Items wanted, n.

    Example:
        >>> from recsys_topk.datamodules.draws import request_keys
        >>> keys = request_keys(42, torch.tensor([7, 8]))
        >>> own = torch.tensor([[0, 1], [2, 3]])
        >>> drawn = draw_distinct(Uniform(6, own.device), keys, own, own >= 0, 4)
        >>> drawn.items.sort(-1).values
        tensor([[2, 3, 4, 5],
                [0, 1, 4, 5]])
    """
    lists = keys.shape[0]
    items = own.new_zeros((lists, number + 1))  # the last column takes what is not wanted
    count = own.new_zeros(lists)
    drawn = own.new_zeros(())
    open_rows: Tensor | None = None  # None = all
    begin, length = 0, number + number // 8 + 8
    for _ in range(_ROUNDS if source.tickets and lists and number else 0):
        here = slice(None) if open_rows is None else open_rows
        new = source.item(integers(keys[here], begin, begin + length, source.tickets))
        known, known_mask = own[here], own_mask[here]
        if begin:
            taken = torch.arange(number, device=own.device) < count[here][:, None]
            known, known_mask = torch.cat([known, items[here, :-1]], 1), torch.cat([known_mask, taken], 1)
        fresh = _fresh(known, known_mask, new)
        place = fresh.cumsum(1).add_(count[here][:, None])
        target = torch.where(fresh, place - 1, number).clamp_max_(number)
        items[here] = items[here].scatter_(1, target, new)
        count[here] = place[:, -1].clamp_max(number)
        # Looked at: all draws before the list was full, and the one that filled it.
        drawn = drawn + (place < number).sum() + (place[:, -1] >= number).sum()
        open_rows = (count < number).nonzero().squeeze(1)
        if not open_rows.numel():
            break
        begin, length = begin + length, 2 * length
    else:
        rejected = drawn - count.sum()
        items = items[:, :-1].contiguous()
        _race(source, keys, own, own_mask, items, count)
        return Drawn(items, torch.arange(number, device=own.device) < count[:, None], drawn, rejected)
    full = torch.ones((), dtype=torch.bool, device=own.device).expand(lists, number)
    return Drawn(items[:, :-1], full, drawn, drawn - count.sum())


def _fresh(known: Tensor, known_mask: Tensor, new: Tensor) -> Tensor:
    """Return which of `new` (B, m) are neither among the `known` of their row nor earlier in it."""
    width = known.shape[1]
    columns = torch.arange(width + new.shape[1], device=new.device)
    # Item and column in one integer: after sorting, equal items are neighbours, the earliest column first. Items are
    # below 2^30 (`integers`), so 33 bits are left for the column.
    bits = columns.numel().bit_length()
    packed = torch.cat([torch.where(known_mask, known, -1), new], 1).bitwise_left_shift_(bits).add_(columns)
    packed = _sort_rows(packed)
    item = packed >> bits
    first = torch.ones(packed.shape, dtype=torch.bool, device=new.device)
    torch.ne(item[:, 1:], item[:, :-1], out=first[:, 1:])
    column = packed.bitwise_and_((1 << bits) - 1)
    return torch.empty_like(first).scatter_(1, column, first)[:, width:]


def _sort_rows(x: Tensor) -> Tensor:
    """Sort rows; on the CPU by numpy, whose vectorised sort is several times faster than torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=1))
    return x.sort(dim=1).values


def _race(source: Source, keys: Tensor, own: Tensor, own_mask: Tensor, items: Tensor, count: Tensor) -> None:
    """Fill the short lists in place: of the items left, those with the smallest exponential / weight win."""
    number = items.shape[1]
    weight = source.weight()
    for row in (count < number).nonzero().squeeze(1).tolist():
        time = exponentials(keys[row : row + 1], source.size)[0] / weight
        have = int(count[row])
        time[own[row, own_mask[row]]] = torch.inf
        time[items[row, :have]] = torch.inf
        best, winners = time.topk(min(number - have, source.size), largest=False)
        winners = winners[best.isfinite()]
        items[row, have : have + winners.numel()] = winners
        count[row] = have + winners.numel()
