"""Optimizers that update rows of a table inside backward, without a gradient of the size of the table.

`look_up` uses them for tables that have a `RowUpdate`: it numbers the rows that a batch reads (`number_rows`), adds up
the gradient of each of them, and updates each of them once (`RowUpdate.call`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from recsys_topk.ops.backends.jit import ZERO, Floats, Integers, jit
from recsys_topk.ops.backends.parallel import Call

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

    def call(self, found: NumberedRows, sums: Floats, table: Floats) -> Call:
        """Return the call that updates some rows of a table in place.

        Args:
            found: The rows.
            sums: Their gradients, (K, D) or longer. They are overwritten.
            table: The weights, (rows, D).

        Example:
            >>> from recsys_topk.ops.backends.parallel import run_chains
            >>> table = np.zeros((3, 2), np.float32)
            >>> found = number_rows(3, [(np.array([[1], [1]]), 0, 0)])
            >>> update = RowUpdate("sgd", lambda: 0.5).call(found, np.ones((1, 2), np.float32), table)
            >>> run_chains([[*found.calls, update]])
            >>> table[:, 0]
            array([ 0. , -0.5,  0. ], dtype=float32)
        """
        rate, eps = np.float32(self.rate()), np.float32(self.eps)
        given = (found.rows, found.count, sums, table)
        if self.state is None:
            return Call(sgd, (*given, rate))
        loop = adagrad if self.rule == "adagrad" else rowwise_adagrad
        return Call(loop, (*given, self.state.numpy(), rate, eps))


@dataclass(frozen=True)
class NumberedRows:
    """The distinct rows that a batch reads from one table. The arrays are filled when `calls` have run in order.

    Attributes:
        calls: Fill the arrays.
        rows: Row numbers in the table, in the order in which they first occur. Only the first K are set.
        count: K, as an array of one element.
        numbers: For each use of the table the indices of its rows in `rows`, (..., 1), with -1 for padding.
    """

    calls: list[Call]
    rows: Integers
    count: Integers
    numbers: list[Integers]


def number_rows(size: int, uses: Sequence[tuple[Integers, int, int]]) -> NumberedRows:
    """Number the distinct rows that a batch reads from one table.

    Args:
        size: Number of rows of the table.
        uses: For each feature that uses the table: ids (..., columns), the column of the feature, and the padding id.

    Example:
        >>> from recsys_topk.ops.backends.parallel import run_chains
        >>> found = number_rows(9, [(np.array([[7], [0], [5], [7]]), 0, 0)])
        >>> run_chains([found.calls])
        >>> found.rows[: found.count[0]]
        array([7, 5])
        >>> found.numbers[0].ravel()
        array([ 0, -1,  1,  0])
    """
    numbers = [np.empty((*ids.shape[:-1], 1), np.int64) for ids, _, _ in uses]
    distinct = max(1, min(size, sum(part.size for part in numbers)))
    rows, count = np.empty(distinct, np.int64), np.zeros(1, np.int64)
    # At most half of the places are taken, so that an id is found after one or two tries.
    bits = (2 * distinct - 1).bit_length()
    places = np.zeros(1 << bits, np.int64)
    calls = [
        Call(
            find_rows,
            (ids.reshape(-1, ids.shape[-1]), column, padding, size, places, 64 - bits, rows, count, part.reshape(-1)),
        )
        for (ids, column, padding), part in zip(uses, numbers, strict=True)
    ]
    return NumberedRows(calls, rows, count, numbers)


@jit
def find_rows(
    ids: Integers,
    column: int,
    padding: int,
    size: int,
    places: Integers,
    shift: int,
    rows: Integers,
    count: Integers,
    numbers: Integers,
) -> None:
    """numbers[r] = n with rows[n] = ids[r, column], or -1 for padding and for ids that are not in the table.

    `places` is a hash table with linear probing: it holds n + 1 for the id rows[n], and 0 where it is empty. New ids
    are added to it and to `rows`. count[0] is the number of rows.
    """
    last, known = len(places) - 1, count[0]
    for r in range(ids.shape[0]):
        i = ids[r, column]
        if i == padding or i < 0 or i >= size:
            numbers[r] = -1
            continue
        h = np.int64((np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift))
        n = places[h] - 1
        while n >= 0 and rows[n] != i:
            h = (h + 1) & last
            n = places[h] - 1
        if n < 0:
            n = known
            known += 1
            places[h], rows[n] = known, i
        numbers[r] = n
    count[0] = known


@jit
def clear_rows(count: Integers, sums: Floats) -> None:
    """sums[n] = 0 for all rows."""
    sums[: count[0]] = ZERO


# The rows are scattered over a table that may be far larger than the cache. A first loop reads a number of each of the
# next _AHEAD rows, so that the processor fetches them at the same time. The loops write the sum of these numbers to
# sums[0, 0], which is not used any more, because the compiler would remove reads without an effect.
_AHEAD = 64


@jit
def sgd(rows: Integers, count: Integers, sums: Floats, table: Floats, rate: float) -> None:
    """table[rows[n]] -= rate sums[n]."""
    read = ZERO
    for first in range(0, count[0], _AHEAD):
        last = min(first + _AHEAD, count[0])
        for n in range(first, last):
            read += table[rows[n], 0]
        for n in range(first, last):
            row, total = table[rows[n]], sums[n]
            for d in range(table.shape[1]):
                row[d] -= rate * total[d]
    sums[0, 0] = read


@jit
def adagrad(
    rows: Integers, count: Integers, sums: Floats, table: Floats, state: Floats, rate: float, eps: float
) -> None:
    """state[rows[n]] += sums[n]^2, then table[rows[n]] -= rate sums[n] / (sqrt(state[rows[n]]) + eps)."""
    read = ZERO
    for first in range(0, count[0], _AHEAD):
        last = min(first + _AHEAD, count[0])
        for n in range(first, last):
            read += table[rows[n], 0] + state[rows[n], 0]
        for n in range(first, last):
            row, squares, total = table[rows[n]], state[rows[n]], sums[n]
            for d in range(table.shape[1]):
                squares[d] += total[d] * total[d]
                row[d] -= rate * total[d] / (np.sqrt(squares[d]) + eps)
    sums[0, 0] = read


@jit
def rowwise_adagrad(
    rows: Integers, count: Integers, sums: Floats, table: Floats, state: Floats, rate: float, eps: float
) -> None:
    """state[rows[n]] += mean of sums[n]^2, then table[rows[n]] -= rate sums[n] / (sqrt(state[rows[n]]) + eps)."""
    dim, read = table.shape[1], ZERO
    for first in range(0, count[0], _AHEAD):
        last = min(first + _AHEAD, count[0])
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
    sums[0, 0] = read
