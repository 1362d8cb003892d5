"""Arguments of the operations of `recsys_topk.ops.stages` for the comparison of their backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.stages.attention import attention_logits, logits
from recsys_topk.ops.stages.join_relu import join_relu
from recsys_topk.ops.stages.look_up import Slot, look_up
from recsys_topk.ops.stages.pooled_dot import dot
from tests.ops.samples.registry import sampled


@sampled(attention_logits)
@sampled(logits)
def logits_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    for number in (1, 4, 5, 9):
        history = torch.randn(6, 5, 7, generator=generator).requires_grad_()
        items = torch.randn(8, 7, generator=generator).requires_grad_()
        weight = torch.randn(7, generator=generator).requires_grad_()
        yield history, items, weight, torch.randint(8, (6, number), generator=generator), torch.full((6,), 5)


@sampled(join_relu)
def join_relu_samples(generator: torch.Generator) -> Iterator[tuple[Tensor | None, Tensor, Tensor, Tensor]]:
    for lists, number, pool, width in ((3, 5, 8, 7), (1, 1, 1, 1), (0, 5, 8, 7)):
        requests = torch.randn(lists, width, generator=generator).requires_grad_()
        items = torch.randn(pool, width, generator=generator).requires_grad_()
        candidates = torch.randint(pool, (lists, number), generator=generator)
        yield None, requests, items, candidates
        # A product, as in a stage: a tensor that is overwritten must not be a leaf.
        yield torch.randn(lists, number, width, generator=generator) * requests[:, None], requests, items, candidates


@sampled(look_up)
def look_up_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    slots = [
        Slot(kind=0, column=0, table=0, name="user", padding=0, start=0, dim=3),
        Slot(kind=0, column=1, table=1, name="item", padding=2, start=3, dim=4),
        Slot(kind=1, column=0, table=1, name="item", padding=2, start=0, dim=4),
    ]
    for lists, views in ((5, 6), (0, 6), (2, 0)):
        tables = [torch.randn(rows, dim, generator=generator).requires_grad_() for rows, dim in ((7, 3), (9, 4))]
        request = torch.randint(7, (lists, 2), generator=generator)
        history = torch.randint(9, (lists, views, 1), generator=generator)
        lengths = torch.randint(views + 1, (lists,), generator=generator)
        yield slots, [request, history], tables, lengths
        yield slots, [request, history.flatten(0, 1)], tables, None


@sampled(dot)
def dot_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for lists, number, pool, width in ((3, 5, 8, 7), (1, 1, 1, 1), (0, 5, 8, 7)):
        requests = torch.randn(lists, width, generator=generator).requires_grad_()
        items = torch.randn(pool, width, generator=generator).requires_grad_()
        yield requests, items, torch.randint(pool, (lists, number), generator=generator)
