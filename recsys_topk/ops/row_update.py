"""Optimizers that update the rows of a table inside backward: no gradient of the size of the table, no sorting.

`look_up` uses them for tables that have a `RowUpdate`: it numbers the rows that a batch reads (`number_rows`), adds up
the gradient of each of them, and updates each of them once (`RowUpdate.apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from recsys_topk.ops.jit import ZERO, Floats, Integers, jit

Rule = Literal["sgd", "adagrad", "rowwise_adagrad"]


@dataclass(frozen=True)
class RowUpdate:
    """How the rows of a table are updated inside backward, given the sum g of the gradients of a row w.

    - ``"sgd"``: w -= rate g.
    - ``"adagrad"``: s += g^2, then w -= rate g / (sqrt(s) + eps), with one s per weight.
    - ``"rowwise_adagrad"``: s += mean(g^2), then w -= rate g / (sqrt(s) + eps), with one s per row.

    Rows that the batch does not read keep their weights and state.

    Attributes:
        rule: Name of the optimizer.
        rate: Returns the learning rate; called in backward.
        eps: Added to the square root; above 0.
        state: s, contiguous float32: (rows, D) for Adagrad, (rows,) for row-wise Adagrad; None for SGD.
    """

    rule: Rule
    rate: Callable[[], float]
    eps: float = 1e-10
    state: Tensor | None = None

    def apply(self, rows: Integers, sums: Floats, table: Floats) -> None:
        """Update some rows of a table in place.

        Args:
            rows: Their numbers, (K,), each once.
            sums: Their gradients, (K, D).
            table: The weights, (rows, D).

        Example:
            >>> table = np.zeros((3, 2), np.float32)
            >>> RowUpdate("sgd", lambda: 0.5).apply(np.array([1]), np.ones((1, 2), np.float32), table)
            >>> table[:, 0]
            array([ 0. , -0.5,  0. ], dtype=float32)
        """
        rate, eps = np.float32(self.rate()), np.float32(self.eps)
        if self.state is None:
            sgd(rows, sums, table, rate)
        elif self.rule == "adagrad":
            adagrad(rows, sums, table, self.state.numpy(), rate, eps)
        else:
            rowwise_adagrad(rows, sums, table, self.state.numpy(), rate, eps)


def number_rows(size: int, uses: Sequence[tuple[Integers, int, int]]) -> tuple[Integers, list[Integers]]:
    """Number the distinct rows that a batch reads from one table.

    Args:
        size: Number of rows of the table.
        uses: Ids (..., columns), the column that holds those of this table, and the id that is padding.

    Returns:
        The rows, (K,), in the order in which they first occur; and of each use the numbers of its rows, (..., 1), with
        -1 for padding.

    Example:
        >>> number_rows(9, [(np.array([[7], [0], [5], [7]]), 0, 0)])
        (array([7, 5]), [array([[ 0],
               [-1],
               [ 1],
               [ 0]])])
    """
    numbers = [np.empty((*ids.shape[:-1], 1), np.int64) for ids, _, _ in uses]
    distinct = max(1, min(size, sum(part.size for part in numbers)))
    rows, count = np.empty(distinct, np.int64), 0
    # At most half of the places are taken, so that an id is found after one or two looks.
    bits = (2 * distinct - 1).bit_length()
    places = np.zeros(1 << bits, np.int64)
    for (ids, column, padding), part in zip(uses, numbers, strict=True):
        count = find_rows(ids.reshape(-1, ids.shape[-1]), column, padding, size, places, 64 - bits, rows, count, part)
    return rows[:count], numbers


@jit
def find_rows(
    ids: Integers,
    column: int,
    padding: int,
    size: int,
    places: Integers,
    shift: int,
    rows: Integers,
    count: int,
    numbers: Integers,
) -> int:
    """numbers[r] = n with rows[n] = ids[r, column], or -1 for padding and what is not in the table.

    A hash table: places[h] = n + 1 for the id whose hash is h, or is a little before h; 0 = nothing. New ids are
    added to it and to `rows`, which holds `count` of them. Returns how many it holds then.
    """
    last = len(places) - 1
    found = numbers.reshape(-1)
    for r in range(ids.shape[0]):
        i = ids[r, column]
        if i == padding or i < 0 or i >= size:
            found[r] = -1
            continue
        h = np.int64((np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift))
        n = places[h] - 1
        while n >= 0 and rows[n] != i:
            h = (h + 1) & last
            n = places[h] - 1
        if n < 0:
            n = count
            count += 1
            places[h], rows[n] = count, i
        found[r] = n
    return count


# The rows lie anywhere in a table that may be far larger than the cache. So that many of them are on their way at once,
# those of the next _AHEAD updates are read first, and used for nothing but a sum that is returned.
_AHEAD = 64


@jit
def sgd(rows: Integers, sums: Floats, table: Floats, rate: float) -> float:
    """table[rows[n]] -= rate sums[n]."""
    read = ZERO
    for first in range(0, len(rows), _AHEAD):
        last = min(first + _AHEAD, len(rows))
        for n in range(first, last):
            read += table[rows[n], 0]
        for n in range(first, last):
            row, total = table[rows[n]], sums[n]
            for d in range(table.shape[1]):
                row[d] -= rate * total[d]
    return float(read)


@jit
def adagrad(rows: Integers, sums: Floats, table: Floats, state: Floats, rate: float, eps: float) -> float:
    """state[rows[n]] += sums[n]^2, then table[rows[n]] -= rate sums[n] / (sqrt(state[rows[n]]) + eps)."""
    read = ZERO
    for first in range(0, len(rows), _AHEAD):
        last = min(first + _AHEAD, len(rows))
        for n in range(first, last):
            read += table[rows[n], 0] + state[rows[n], 0]
        for n in range(first, last):
            row, squares, total = table[rows[n]], state[rows[n]], sums[n]
            for d in range(table.shape[1]):
                squares[d] += total[d] * total[d]
                row[d] -= rate * total[d] / (np.sqrt(squares[d]) + eps)
    return float(read)


@jit
def rowwise_adagrad(rows: Integers, sums: Floats, table: Floats, state: Floats, rate: float, eps: float) -> float:
    """state[rows[n]] += mean of sums[n]^2, then table[rows[n]] -= rate sums[n] / (sqrt(state[rows[n]]) + eps)."""
    dim, read = table.shape[1], ZERO
    for first in range(0, len(rows), _AHEAD):
        last = min(first + _AHEAD, len(rows))
        for n in range(first, last):
            read += table[rows[n], 0] + state[rows[n]]
        for n in range(first, last):
            row, total = table[rows[n]], sums[n]
            square = ZERO
            for d in range(dim):
                square += total[d] * total[d]
            state[rows[n]] += square / np.float32(dim)
            step = rate / (np.sqrt(state[rows[n]]) + eps)
            for d in range(dim):
                row[d] -= step * total[d]
    return float(read)
