"""Draw distinct items for every list, excluding the list's own items, uniformly or by number of occurrences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from recsys_topk.datamodules.negatives.draws import exponentials, integers
from recsys_topk.ops.dispatch import may_read

_ROUNDS: Final = 4
"""Number of rounds of draws. Each has twice as many draws as the one before. `_race` then fills incomplete lists."""

_RACE_CELLS: Final = 2**22
"""Maximum of lists times items in one race."""

_NEGLIGIBLE: Final = 1e-12
"""On devices other than the CPU, incomplete lists are ignored if their probability is below this value."""


class Source(Protocol):
    """A distribution of items: `tickets` equally likely numbers, each of which belongs to one of `size` items."""

    @property
    def size(self) -> int:
        """Number of items."""

    @property
    def tickets(self) -> int | Tensor:
        """Number of tickets; a scalar tensor if it is known only on the device."""

    def item(self, ticket: Tensor) -> Tensor:
        """Return the item of each ticket."""

    def weight(self) -> Tensor:
        """Return the number of tickets of each item, (size,)."""


@dataclass(frozen=True)
class Uniform:
    """Every item has one ticket."""

    size: int
    device: torch.device

    @property
    def tickets(self) -> int:
        """The number of items."""
        return self.size

    def item(self, ticket: Tensor) -> Tensor:
        """Return the ticket itself."""
        return ticket

    def weight(self) -> Tensor:
        """Return ones."""
        return torch.ones(self.size, device=self.device)


@dataclass(frozen=True)
class Occurrences:
    """Every occurrence of an item in a list is a ticket. Items are drawn in proportion to their number of occurrences.

    Attributes:
        occurrences: (T,) items.
        size: Number of items.
        number: Scalar; only the first `number` occurrences are used; None = all.
    """

    occurrences: Tensor
    size: int
    number: Tensor | None = None

    @classmethod
    def in_lists(cls, items: Tensor, mask: Tensor, size: int) -> Occurrences:
        """Return the occurrences in lists (B, N) where `mask` is True. On a GPU the array has length B N."""
        if may_read(mask):
            return cls(items.masked_select(mask), size)
        place = torch.where(mask, mask.view(-1).cumsum(0).view_as(mask) - 1, mask.numel())
        packed = items.new_zeros(mask.numel() + 1).scatter_(0, place.view(-1), items.reshape(-1))
        return cls(packed[:-1], size, mask.sum())

    @property
    def tickets(self) -> int | Tensor:
        """The number of occurrences."""
        return self.occurrences.numel() if self.number is None else self.number

    def item(self, ticket: Tensor) -> Tensor:
        """Return the item of each occurrence."""
        return self.occurrences.take(ticket).long()

    def weight(self) -> Tensor:
        """Return the number of occurrences of each item."""
        if may_read(self.occurrences) and self.number is None:
            return torch.bincount(self.occurrences, minlength=self.size).float()
        counts = (torch.arange(self.occurrences.numel(), device=self.occurrences.device) < self.tickets).float()
        return counts.new_zeros(self.size).scatter_add_(0, self.occurrences.long(), counts)


@dataclass(frozen=True)
class Drawn:
    """The result of `draw_distinct`.

    Attributes:
        items: (B, n) items, 0 where nothing could be drawn.
        mask: (B, n) boolean, True = an item was drawn. The drawn items of a list come first.
        drawn: Scalar, number of draws used.
        rejected: Scalar, number of these draws that were rejected: own items of the list, and repeats.
        tries: (B,) int64, number of draws used for each list.
        waited: (B,) float64, the time that the race after the draws took to fill the list. The unit is the average time
            of one draw. 0 without a race, infinite for a list that is not full.
    """

    items: Tensor
    mask: Tensor
    drawn: Tensor
    rejected: Tensor
    tries: Tensor
    waited: Tensor


def draw_distinct(source: Source, keys: Tensor, listed: Tensor, listed_mask: Tensor, number: int) -> Drawn:
    """Draw `number` distinct items for each list, excluding the list's own items.

    A list accepts its draws in order and rejects own items and repeats. The result depends only on the key, the own
    items and the source, not on the other lists. If rejection would take too long (most of the source is own items and
    repeats), an exponential race over all items fills the remaining places. The race has the same distribution. If
    fewer than `number` items remain, the rest is masked.

    Cost: O(B (N + n) log(N + n)) time, O(B (N + n)) memory. On devices other than the CPU, no value is read on the
    host: every list takes part in every round, and the draws are the same. The race is then limited to 2^22 pairs of
    list and item, and fills the lists with the fewest items. If 15 (n + n / 8 + 8) draws leave more lists incomplete
    than that, the rest is masked.

    Args:
        source: The source of the items.
        keys: (B,) from `request_keys`.
        listed: (B, N) items of each list.
        listed_mask: (B, N) boolean, True = a real item.
        number: Number of items to draw per list, n.

    Example:
        >>> from recsys_topk.datamodules.negatives.draws import request_keys
        >>> keys = request_keys(42, torch.tensor([7, 8]))
        >>> listed = torch.tensor([[0, 1], [2, 3]])
        >>> drawn = draw_distinct(Uniform(6, listed.device), keys, listed, listed >= 0, 4)
        >>> drawn.items.sort(-1).values
        tensor([[2, 3, 4, 5],
                [0, 1, 4, 5]])
    """
    reads, size, lists = may_read(listed), source.size, keys.shape[0]
    columns = torch.arange(number, device=listed.device)
    items = listed.new_zeros((lists, number + 1))  # the last column receives unwanted items
    count, tries = listed.new_zeros(lists), listed.new_zeros(lists)
    rounds, surely = _ROUNDS, False
    if not reads and isinstance(source, Uniform) and size:
        # A uniform draw is rejected only if it is an own item or a repeat: a lower bound of its acceptance rate.
        rounds, surely = rounds_needed(1.0 - (listed.shape[1] + number) / size, number)
    here: Tensor | slice = slice(None)  # the incomplete lists; all lists where they cannot be read
    begin, length = 0, _first_length(number)
    for _ in range(rounds if (source.tickets if reads else size) and lists and number else 0):
        new = source.item(integers(keys[here], begin, begin + length, source.tickets))
        known, known_mask, have = listed[here], listed_mask[here], count[here]
        if begin:
            taken = columns < have[:, None]
            known, known_mask = torch.cat([known, items[here, :-1]], 1), torch.cat([known_mask, taken], 1)
        fresh = _fresh(known, known_mask, new)
        if isinstance(source.tickets, Tensor):
            fresh = fresh & (source.tickets > 0)
        place = fresh.cumsum(1).add_(have[:, None])
        target = torch.where(fresh, place - 1, number).clamp_max_(number)
        items[here] = items[here].scatter_(1, target, new)
        # Draws used: all draws before the list was full, and the draw that filled it.
        looked = (place < number).sum(1) + (place[:, -1] >= number)
        tries[here] += looked if reads else torch.where(have < number, looked, 0)
        count[here] = place[:, -1].clamp_max(number)
        begin, length = begin + length, 2 * length
        if reads:
            here = (count < number).nonzero().squeeze(1)
            if not here.numel():
                surely = True
                break
    drawn, waited = tries.sum(), torch.zeros_like(tries, dtype=torch.float64)
    rejected = drawn - count.sum()
    if reads and surely:
        full = torch.ones((), dtype=torch.bool, device=listed.device).expand(lists, number)
        return Drawn(items[:, :-1], full, drawn, rejected, tries, waited)
    if not surely and size and lists and number:
        limit = max(1, _RACE_CELLS // size)
        few = (count < number).nonzero().squeeze(1) if reads else count.topk(min(lists, limit), largest=False).indices
        for rows in torch.split(few, limit):
            waited[rows] = _race(source, keys, listed, listed_mask, items, count, rows)
    waited = torch.where(count < number, torch.inf, waited)
    return Drawn(items[:, :-1], columns < count[:, None], drawn, rejected, tries, waited)


def _first_length(number: int) -> int:
    return number + number // 8 + 8


def rounds_needed(accepted: float, number: int) -> tuple[int, bool]:
    """Return the number of rounds that fill a list of `number` items, and whether failure has negligible probability.

    Let each of D draws be accepted with probability at least `accepted`. The probability that fewer than `number` are
    accepted is at most exp(-2 D (accepted - number / D)^2) (Hoeffding).

    Example:
        >>> rounds_needed(0.98, 25), rounds_needed(0.1, 25)
        ((2, True), (4, False))
    """
    draws = 0
    for used in range(1, _ROUNDS + 1):
        draws += _first_length(number) << (used - 1)
        margin = accepted - number / draws
        if margin > 0 and math.exp(-2.0 * draws * margin * margin) < _NEGLIGIBLE:
            return used, True
    return _ROUNDS, False


def _fresh(known: Tensor, known_mask: Tensor, new: Tensor) -> Tensor:
    """Return a mask of the items of `new` (B, m) that are neither in `known` nor earlier in the same row of `new`."""
    width = known.shape[1]
    columns = torch.arange(width + new.shape[1], device=new.device)
    # Pack item and column into one integer. After sorting, equal items are adjacent, the earliest column first. Items
    # are below 2^30 (`integers`), so 33 bits are left for the column.
    bits = columns.numel().bit_length()
    packed = torch.cat([torch.where(known_mask, known, -1), new], 1).bitwise_left_shift_(bits).add_(columns)
    packed = _sort_rows(packed)
    item = packed >> bits
    first = torch.ones(packed.shape, dtype=torch.bool, device=new.device)
    torch.ne(item[:, 1:], item[:, :-1], out=first[:, 1:])
    column = packed.bitwise_and_((1 << bits) - 1)
    return torch.empty_like(first).scatter_(1, column, first)[:, width:]


def _sort_rows(x: Tensor) -> Tensor:
    """Sort rows. On the CPU numpy is used, because its vectorised sort is several times faster than torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=1))
    return x.sort(dim=1).values


def _race(
    source: Source, keys: Tensor, listed: Tensor, listed_mask: Tensor, items: Tensor, count: Tensor, rows: Tensor
) -> Tensor:
    """Fill lists `rows` in place with the remaining items that have the smallest exponential / weight.

    Shapes do not depend on values. The last column of `items` receives unwanted items. Return the time of each race,
    as in `Drawn.waited`.
    """
    number, size, have = items.shape[1] - 1, source.size, count[rows]
    time = torch.nn.functional.pad(exponentials(keys[rows], size) / source.weight(), (0, 1))
    taken = torch.arange(number, device=listed.device) < have[:, None]
    time.scatter_(1, torch.where(listed_mask[rows], listed[rows], size), torch.inf)
    time.scatter_(1, torch.where(taken, items[rows, :-1], size), torch.inf)
    best, winners = time[:, :-1].topk(min(number, size), largest=False)
    place = have[:, None] + torch.arange(winners.shape[1], device=listed.device)
    wins = best.isfinite() & (place < number)
    items[rows] = items[rows].scatter_(1, torch.where(wins, place, number), winners)
    count[rows] = have + wins.sum(1)
    return (torch.where(wins, best, 0.0).amax(1) * source.tickets).double()
