"""Random batches of difficult lists. Each batch depends only on the seed and its number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recsys_topk.testing.lists import JUNK_SCORES

BATCH = 1024
LARGEST = 1 << 18
TEMPERATURES = (1e-3, 0.05, 1.0, 20.0, 500.0)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SCALES = (0.0, 1e-3, 1.0, 1.0, 10.0, 1e3, 1e5, 1e7, 1e30)
OFFSETS = (0.0, 0.0, 0.0, 1.0, -1e3, 1e6, -1e7)

# Cost of a list of n items, by the `cost` of a loss or operator; n^2 for all others (k is at most n + 1).
_WORK: dict[str, Callable[[int], float]] = {
    "n": lambda n: n,
    "n log n": lambda n: n * math.log2(n + 1),
    "n log^2 n": lambda n: n * math.log2(n + 1) ** 2,
}


@dataclass(frozen=True)
class RandomLists:
    """A batch of random lists."""

    seed: int  # seed of the batch
    scores: Tensor  # (B, N)
    labels: Tensor  # (B, N) float32
    mask: Tensor | None  # boolean (B, N), or None
    k: int | Tensor  # one int, or one int per list
    weights: Tensor | None  # (B,) float32, or None
    tau: float  # the temperature to try
    item_weights: Tensor | None  # (B, N) float32, or None

    def to(self, device: str) -> RandomLists:
        """Return the batch on a device."""
        moved: Any = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def list(self, row: int) -> str:
        """Return one list as text."""
        k = int(self.k[row]) if isinstance(self.k, Tensor) else self.k
        mask = None if self.mask is None else self.mask[row].int().tolist()
        weights = None if self.item_weights is None else self.item_weights[row].tolist()
        return (
            f"scores={self.scores[row].tolist()} ({self.scores.dtype}) labels={self.labels[row].tolist()} "
            f"mask={mask} k={k} (per list: {isinstance(self.k, Tensor)}) tau={self.tau} item_weights={weights}"
        )


def random_lists(seed: int, number: int, most: int = BATCH, cost: str = "n") -> RandomLists:
    """Return one batch of one dtype and temperature, with lengths 1 to 12, or up to 300 in one of ten batches.

    Within a batch each list has its own scale, offset, ties, mask, in half of the batches k, and in 3 of 10 batches
    item weights. Batches grow from 64 to 1024 lists (at most `most`), so that few lists cover many kinds, and many
    lists need few calls. A higher `cost` of the loss or operator, for example ``"n^2"``, gives fewer long lists.

    Example:
        >>> batch = random_lists(seed=0, number=4)
        >>> batch.scores.shape, torch.equal(batch.labels, random_lists(seed=0, number=4).labels)
        (torch.Size([64, 7]), True)
    """
    own = (seed * 1_000_003 + number) % 2**32  # the CPU generator of torch uses 32 bits of the seed
    draw = torch.Generator().manual_seed(own)

    def pick(options: Sequence[Any], size: tuple[int, ...] = ()) -> Any:
        index = torch.randint(len(options), size, generator=draw)
        return torch.tensor(options)[index] if size else options[int(index)]

    def chance(probability: float, *size: int) -> Tensor:
        return torch.rand(*size, generator=draw) < probability

    longest = pick((40, 130, 300)) if bool(chance(0.1, 1)) else 12
    n = int(torch.randint(1, longest + 1, (), generator=draw))
    work = _WORK[cost](n) if cost in _WORK else n * n
    rows = max(1, min(BATCH, 64 << min(number // 16, 10), most, int(LARGEST / work)))
    dtype, column = pick(DTYPES), (rows, 1)
    drawn = torch.randn(rows, n, generator=draw, dtype=torch.float64)
    tied = torch.randint(-1, 2, (rows, n), generator=draw).double()
    drawn = torch.where(chance(0.3, *column), tied, drawn)
    scores = drawn * pick(SCALES, column).double() + pick(OFFSETS, column).double()
    limit = float(torch.finfo(dtype).max) if dtype == torch.float16 else 1e30
    scores = scores.clamp(-limit, limit).to(dtype)
    top = pick((1, 4, 29))  # clicks, grades, places
    labels = torch.randint(0, top + 1, (rows, n), generator=draw) * chance(0.5, rows, n)
    mask: Tensor | None = None
    if bool(chance(0.5, 1)):
        holes = chance(float(pick((0.2, 0.5, 0.9))), rows, n)
        lengths = torch.randint(0, n + 1, column, generator=draw)
        mask = torch.where(chance(0.5, *column), holes, torch.arange(n) < lengths)
        junk = torch.tensor(JUNK_SCORES).to(dtype)[torch.randint(len(JUNK_SCORES), (rows, n), generator=draw)]
        scores = torch.where(mask, scores, junk)
    ks = torch.randint(0, n + 2, (rows,), generator=draw)
    k: int | Tensor = ks if bool(chance(0.5, 1)) else int(ks[0])
    weights = torch.rand(rows, generator=draw) if bool(chance(0.2, 1)) else None
    tau = pick(TEMPERATURES)
    each: Tensor | None = None
    if bool(chance(0.3, 1)):  # copies and weights of 0, equal fractions, or weights of any size
        copies = torch.randint(0, 4, (rows, n), generator=draw).float()
        any_size = torch.exp(2.0 * torch.randn(rows, n, generator=draw)) * chance(0.8, rows, n)
        kind = torch.randint(3, column, generator=draw)
        each = torch.where(kind == 0, copies, torch.where(kind == 1, 0.1, any_size))
    return RandomLists(own, scores, labels.to(torch.float32), mask, k, weights, tau, each)
