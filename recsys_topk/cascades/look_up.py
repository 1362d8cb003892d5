"""Embedding look-ups of plain float32 tables on a CPU, by compiled loops: no bags, no offsets, no sorting.

The tables stay TorchRec's (`EmbeddingBagCollection`); only the reading of unsharded ones with an ordinary optimizer
goes past its kernels, whose backward sorts the ids of every table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.compiled import at_once, kernels


@dataclass(frozen=True)
class Slot:
    """Where a feature is read and written.

    Attributes:
        kind: Number of the ids that it reads, in the order in which `look_up` gets them.
        column: Its column in the ids.
        table: Number of its table.
        name: The table's name, for messages.
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


def look_up(slots: Sequence[Slot], ids: Sequence[Tensor], tables: Sequence[Tensor], lengths: Tensor | None) -> Any:
    """Return the embeddings of each kind of ids, features side by side: a tuple of (rows, width).

    Args:
        slots: The features.
        ids: Of each kind, (rows, columns); the last one (B, L, columns) if its mean over views is wanted.
        tables: The weights, (rows, D).
        lengths: Number of views of each request, (B,), for the mean; None for the embedding of every row.
    """
    return _LookUp.apply(slots, ids, lengths, *tables)  # type: ignore[no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slots: Sequence[Slot], ids: Sequence[Tensor], lengths: Tensor | None, *tables: Tensor
    ) -> tuple[Tensor, ...]:
        compiled = kernels(*tables)
        assert compiled is not None
        widths = [sum(slot.dim for slot in slots if slot.kind == kind) for kind in range(len(ids))]
        made = tuple(tables[0].new_empty(rows.shape[0], width) for rows, width in zip(ids, widths, strict=True))
        numbers, weights, outputs = ([x.detach().numpy() for x in group] for group in (ids, tables, made))
        counts = None if lengths is None else lengths.numpy()

        def read(slot: Slot) -> None:
            source = numbers[slot.kind]
            passed = (slot.column, weights[slot.table], slot.padding, outputs[slot.kind], slot.start)
            if source.ndim == 3:
                wrong = compiled.embed_means(source, counts, *passed)
            else:
                wrong = compiled.embed_rows(source, *passed)
            if wrong >= 0:
                seen, rows = source[wrong, ..., slot.column], len(weights[slot.table])
                found = seen[(seen < 0) | (seen >= rows)].flat[0]
                raise IndexError(f"{slot.name}: id {found} is not in the table, which has the ids 0 to {rows - 1}")

        at_once(read, slots)
        ctx.slots, ctx.numbers, ctx.counts, ctx.compiled = slots, numbers, counts, compiled
        ctx.shapes = [table.shape for table in tables]
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        upstream = [None if grad is None else grad.contiguous().numpy() for grad in grads]
        made = [torch.zeros(shape) for shape in ctx.shapes]

        def add(table: int) -> None:
            """Add all that touches one table, one feature after another: no two threads write to the same."""
            target = made[table].numpy()
            for slot in ctx.slots:
                grad, source = upstream[slot.kind], ctx.numbers[slot.kind]
                if slot.table != table or grad is None:
                    continue
                if source.ndim == 3:
                    ctx.compiled.embed_means_backward(
                        source, ctx.counts, slot.column, slot.padding, grad, slot.start, target
                    )
                else:
                    ctx.compiled.embed_rows_backward(source, slot.column, slot.padding, grad, slot.start, target)

        at_once(add, range(len(made)))
        return (None, None, None, *made)
