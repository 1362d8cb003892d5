"""Embedding look-up on a CPU, without bags, offsets or sorting.

The tables remain TorchRec's (`EmbeddingBagCollection`, or the fused one). This module reads the unsharded tables, and
updates those with a fused optimizer, without TorchRec's kernels, whose backward pass sorts the ids of every table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.ops.backends.jit import ZERO, Floats, Integers, jit
from recsys_topk.ops.backends.parallel import Call, run_chains
from recsys_topk.ops.dispatch import apply, is_float32, operation, through_reference, wants_graph
from recsys_topk.ops.stages.row_update import RowUpdate, clear_rows, number_rows


@dataclass(frozen=True)
class Slot:
    """Input and output position of a feature.

    Attributes:
        kind: Index of its ids among the `ids` of `look_up`.
        column: Its column in the ids.
        table: Index of its table.
        name: The table's name, for error messages.
        padding: The id whose embedding is 0.
        start: First column in the output.
        dim: Number of columns in the output.
    """

    kind: int
    column: int
    table: int
    name: str
    padding: int
    start: int
    dim: int


@operation
def look_up(
    slots: Sequence[Slot], ids: Sequence[Tensor], tables: Sequence[Tensor], lengths: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the embeddings of each kind of ids with concatenated features: a tuple of (rows, width).

    Args:
        slots: The features.
        ids: (rows, columns) for each kind; the last one is (B, L, columns) for its mean over views.
        tables: The weights, (rows, D).
        lengths: Number of views of each request, (B,), for the mean; None = the embedding of every row.
    """
    parts: list[list[Tensor]] = [[] for _ in ids]
    for slot in sorted(slots, key=lambda slot: slot.start):
        rows = ids[slot.kind][..., slot.column]
        embedded = F.embedding(rows, tables[slot.table]) * (rows != slot.padding)[..., None]
        if rows.dim() == 2 and lengths is not None:
            seen = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
            embedded = torch.where(seen[..., None], embedded, 0.0).sum(1) / lengths.clamp_min(1)[:, None]
        parts[slot.kind].append(embedded)
    return tuple(torch.cat(part, 1) for part in parts)


def _serves(slots: Sequence[Slot], ids: Sequence[Tensor], tables: Sequence[Tensor], lengths: Tensor | None) -> bool:
    return is_float32(*tables) and all(table.is_contiguous() for table in tables)


@look_up.backend("numba", _serves)
def _numba(
    slots: Sequence[Slot], ids: Sequence[Tensor], tables: Sequence[Tensor], lengths: Tensor | None
) -> tuple[Tensor, ...]:
    return look_up_and_update(slots, ids, tables, lengths, [None] * len(tables))


def look_up_and_update(
    slots: Sequence[Slot],
    ids: Sequence[Tensor],
    tables: Sequence[Tensor],
    lengths: Tensor | None,
    updates: Sequence[RowUpdate | None],
) -> tuple[Tensor, ...]:
    """Return the result of `look_up` for tables that its ``numba`` backend supports; update some in backward.

    Args:
        slots: As in `look_up`.
        ids: As in `look_up`.
        tables: The weights. They must require a gradient, also those with an update, which get no gradient.
        lengths: As in `look_up`.
        updates: How to update the rows of each table in place in backward; None = the table gets a gradient.
    """
    made: tuple[Tensor, ...] = apply(_LookUp, slots, ids, lengths, updates, *tables)
    return made


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        slots: Sequence[Slot],
        ids: Sequence[Tensor],
        lengths: Tensor | None,
        updates: Sequence[RowUpdate | None],
        *tables: Tensor,
    ) -> tuple[Tensor, ...]:
        widths = [sum(slot.dim for slot in slots if slot.kind == kind) for kind in range(len(ids))]
        made = tuple(tables[0].new_empty(rows.shape[0], width) for rows, width in zip(ids, widths, strict=True))
        numbers = [x.contiguous().numpy() for x in ids]
        weights, outputs = ([x.detach().numpy() for x in group] for group in (tables, made))
        counts = None if lengths is None else lengths.contiguous().numpy()
        wrong = np.full(len(slots), -1)
        calls = []
        for number, slot in enumerate(slots):
            source = numbers[slot.kind]
            passed = (slot.column, weights[slot.table], slot.padding, outputs[slot.kind], slot.start, number, wrong)
            if counts is None or source.ndim == 2:
                calls.append(Call(embed_rows, (source, *passed)))
            else:
                calls.append(Call(embed_means, (source, counts, *passed)))
        calls.sort(key=lambda call: -call.arguments[0].size)
        run_chains([[call] for call in calls])
        for slot, row in zip(slots, wrong, strict=True):
            if row >= 0:
                seen, rows = numbers[slot.kind][row, ..., slot.column], len(weights[slot.table])
                found = seen[(seen < 0) | (seen >= rows)].flat[0]
                raise IndexError(f"{slot.name}: id {found} is not in the table, which has the ids 0 to {rows - 1}")
        ctx.slots, ctx.numbers, ctx.counts, ctx.updates = slots, numbers, counts, updates
        ctx.weights = [None if update is None else weight for update, weight in zip(updates, weights, strict=True)]
        ctx.shapes = [table.shape for table in tables]
        ctx.indices = (ids, lengths)
        ctx.save_for_backward(*tables)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if wants_graph() and not any(ctx.updates):
            ids, lengths = ctx.indices
            tables = ctx.saved_tensors
            again = through_reference(lambda *t: look_up.reference(ctx.slots, ids, t, lengths), tables, grads)
            return (None, None, None, None, *again)
        upstream = [None if grad is None else grad.detach().contiguous().numpy() for grad in grads]
        made = [
            torch.zeros(shape) if update is None else None
            for shape, update in zip(ctx.shapes, ctx.updates, strict=True)
        ]
        chains: list[tuple[int, list[Call]]] = []  # one per table, so that no two threads write to the same table
        for table, (gradient, update) in enumerate(zip(made, ctx.updates, strict=True)):
            slots = [slot for slot in ctx.slots if slot.table == table and upstream[slot.kind] is not None]
            uses = [(ctx.numbers[slot.kind], slot.column, slot.padding) for slot in slots]
            if gradient is not None:
                chain = _add(slots, uses, ctx.counts, upstream, gradient.numpy())
            else:
                found = number_rows(ctx.shapes[table][0], uses)
                sums = np.empty((len(found.rows), ctx.shapes[table][1]), np.float32)
                numbered = [(numbers, 0, -1) for numbers in found.numbers]
                added = _add(slots, numbered, ctx.counts, upstream, sums)
                apply_update = update.call(found, sums, ctx.weights[table])
                chain = [*found.calls, Call(clear_rows, (found.count, sums)), *added, apply_update]
            chains.append((sum(ids[..., 0].size for ids, _, _ in uses), chain))
        chains.sort(key=lambda entry: -entry[0])
        run_chains([chain for _, chain in chains])
        return (None, None, None, None, *made)


def _add(
    slots: Sequence[Slot],
    uses: Sequence[tuple[Integers, int, int]],
    counts: Integers | None,
    upstream: Sequence[Any],
    target: Floats,
) -> list[Call]:
    """Return calls that add the gradients of all features of one table to `target`.

    Each use has ids, their column, and the padding id.
    """
    calls = []
    for slot, (ids, column, padding) in zip(slots, uses, strict=True):
        rest = (column, padding, upstream[slot.kind], slot.start, target)
        if ids.ndim == 3:
            scratch = np.empty(target.shape[1], np.float32)  # a loop must not allocate memory
            calls.append(Call(embed_means_backward, (ids, counts, *rest, scratch)))
        else:
            calls.append(Call(embed_rows_backward, (ids, *rest)))
    return calls


# Loops over D take four columns at a time and index the arrays directly. The compiler does not know D; in this form it
# makes vector operations for a small D too.


@jit
def embed_rows(
    ids: Integers, column: int, table: Floats, padding: int, out: Floats, start: int, number: int, wrong: Integers
) -> None:
    """out[r, start:start + D] = table[ids[r, column]], or 0 for the padding id.

    Set wrong[number] to the first row whose id is not in the table, and stop there.
    """
    rows, dim = table.shape
    whole = dim - dim % 4
    for begin in range(0, ids.shape[0], 16):
        end = min(begin + 16, ids.shape[0])
        # The first column is read in a separate loop, so that the scattered rows of 16 ids are fetched at once.
        for r in range(begin, end):
            i = ids[r, column]
            if i < 0 or i >= rows:
                wrong[number] = r
                return
            out[r, start] = table[i, 0]
        for r in range(begin, end):
            i = ids[r, column]
            if i == padding:
                for d in range(dim):
                    out[r, start + d] = ZERO
            else:
                for first in range(0, whole, 4):
                    for d in range(first, first + 4):
                        out[r, start + d] = table[i, d]
                for d in range(whole, dim):
                    out[r, start + d] = table[i, d]


@jit
def embed_rows_backward(ids: Integers, column: int, padding: int, grad: Floats, start: int, grad_table: Floats) -> None:
    """Add the gradient of `embed_rows` to the gradient of the table, row by row."""
    dim = grad_table.shape[1]
    whole = dim - dim % 4
    for r in range(ids.shape[0]):
        i = ids[r, column]
        if i != padding:
            for first in range(0, whole, 4):
                for d in range(first, first + 4):
                    grad_table[i, d] += grad[r, start + d]
            for d in range(whole, dim):
                grad_table[i, d] += grad[r, start + d]


@jit
def embed_means(
    ids: Integers,
    lengths: Integers,
    column: int,
    table: Floats,
    padding: int,
    out: Floats,
    start: int,
    number: int,
    wrong: Integers,
) -> None:
    """out[b, start:start + D] = mean of table[ids[b, l, column]] over l < lengths[b]; padding ids count as 0.

    Set wrong[number] to the first request with an id that is not in the table, and stop there.
    """
    rows, dim = table.shape
    for b in range(ids.shape[0]):
        target = out[b, start : start + dim]
        target[:] = ZERO
        for l in range(lengths[b]):  # noqa: E741
            i = ids[b, l, column]
            if i < 0 or i >= rows:
                wrong[number] = b
                return
            if i != padding:
                source = table[i]
                for d in range(dim):
                    target[d] += source[d]
        share = np.float32(1.0) / np.float32(max(lengths[b], 1))
        for d in range(dim):
            target[d] *= share


@jit
def embed_means_backward(
    ids: Integers,
    lengths: Integers,
    column: int,
    padding: int,
    grad: Floats,
    start: int,
    grad_table: Floats,
    scaled: Floats,
) -> None:
    """Add the gradient of `embed_means` to the gradient of the table; `scaled` is memory for one row."""
    dim = grad_table.shape[1]
    for b in range(ids.shape[0]):
        share = np.float32(1.0) / np.float32(max(lengths[b], 1))
        for d in range(dim):
            scaled[d] = grad[b, start + d] * share
        for l in range(lengths[b]):  # noqa: E741
            i = ids[b, l, column]
            if i != padding:
                target = grad_table[i]
                for d in range(dim):
                    target[d] += scaled[d]
