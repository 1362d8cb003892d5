"""Arguments of the operations of `recsys_topk.ops.selection` for the comparison of their backends."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from recsys_topk.numerics import full_mask
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.clip import clip_logs, clip_threshold
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.from_threshold import Law, from_threshold
from recsys_topk.ops.selection.kth_pair import kth_largest, kth_pair
from recsys_topk.ops.selection.laplace import laplace_logs, laplace_threshold
from recsys_topk.ops.selection.logistic import logistic_logs, logistic_threshold
from recsys_topk.ops.selection.ranks import ranks_of_copies, tie_ranks
from recsys_topk.ops.selection.scan import recurrence
from recsys_topk.ops.selection.sinkhorn_scaling import sinkhorn_scaling
from recsys_topk.ops.selection.sorting import share_ties, sort_descending, sorted_descending
from recsys_topk.ops.selection.subsets import subset_logs
from recsys_topk.ops.selection.weighted import weighted_pair
from tests.ops.samples.registry import sampled


def clip_lists(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 30, generator=generator, dtype=dtype)
        yield x, torch.tensor([1, 5, 10, 20])
        yield x.masked_fill(torch.rand(4, 30, generator=generator) < 0.3, -math.inf), torch.tensor([1, 2, 3, 4])


@sampled(clip_threshold)
def clip_threshold_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for x, k in clip_lists(generator):
        yield *centred(x, k), k


@sampled(clip_logs)
def clip_logs_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
    for x, k in clip_lists(generator):
        moved, gap = centred(x, k)
        yield moved.requires_grad_(), clip_threshold(moved.detach() / 0.7, gap / 0.7, k), 0.7


@sampled(count_true)
def count_true_samples(generator: torch.Generator) -> Iterator[tuple[Tensor]]:
    for shape in ((3, 5), (1, 9), (2, 70_000), (4, 0), (0, 3)):
        yield (torch.rand(shape, generator=generator) > 0.5,)


@sampled(fill_masked)
def fill_masked_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
    for dtype in (torch.float32, torch.float64):
        for value in (0.0, -0.0, 1.0, -7.25, 1e-30, math.inf, -math.inf, math.nan):
            x = torch.randn(4, 9, generator=generator, dtype=dtype)
            mask = torch.rand(4, 9, generator=generator) > 0.4
            yield x.masked_fill(~mask, math.nan).requires_grad_(), mask, value
        yield torch.randn(9, 4, generator=generator, dtype=dtype).t(), mask, -math.inf
        yield torch.empty(0, 3, dtype=dtype), torch.empty(0, 3, dtype=torch.bool), 0.0


@sampled(from_threshold)
def from_threshold_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | float, Law]]:
    laws: tuple[Law, ...] = ("logistic", "laplace", "uniform")
    for law in laws:
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        yield x.requires_grad_(), torch.zeros(3, 1, dtype=torch.float64), 0.7, law


def kth_pair_lists(generator: torch.Generator) -> Iterator[tuple[Tensor, int | Tensor, Tensor]]:
    """Lists that reach every branch of the selection, with and without ties, masks and a k per list."""
    for rows, n, k in ((3, 2, 1), (4, 17, 16), (2, 512, 10), (2, 600, 599), (2, 2000, 30), (1, 25_000, 90)):
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(rows, n, generator=generator, dtype=dtype)
            yield x, k, full_mask(x)
            yield (x * 2).round() / 2, torch.randint(1, k + 1, (rows,), generator=generator), full_mask(x)
            mask = torch.rand(rows, n, generator=generator) > 0.3
            mask[:, :2] = True
            some = torch.minimum(torch.randint(1, k + 1, (rows,), generator=generator), mask.sum(1) - 1)
            yield x.masked_fill(~mask, math.nan), some, mask


@sampled(kth_pair)
def kth_pair_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, int | Tensor, Tensor]]:
    for x, k, mask in kth_pair_lists(generator):
        yield x.requires_grad_(), k, mask


@sampled(kth_largest)
def kth_largest_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    for x, k, mask in kth_pair_lists(generator):
        filled = torch.where(mask, x, -math.inf)
        yield (filled, k, 0) if isinstance(k, Tensor) else (filled, None, k)
    yield torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 0
    yield torch.empty(0, 5), None, 2


def laplace_lists(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 30, generator=generator, dtype=dtype)
        yield x, torch.tensor([1, 5, 10, 20])
        yield x.masked_fill(torch.rand(4, 30, generator=generator) < 0.3, -math.inf), torch.tensor([1, 2, 3, 4])
        yield (x * 2).round(), torch.tensor([3, 3, 3, 29])


@sampled(laplace_threshold)
def laplace_threshold_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    for x, k in laplace_lists(generator):
        yield *centred(x, k), k, 0.7


@sampled(laplace_logs)
def laplace_logs_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, float]]:
    for x, k in laplace_lists(generator):
        moved, gap = centred(x, k)
        yield moved.requires_grad_(), laplace_threshold(moved.detach(), gap, k, 0.7), 0.7


@sampled(logistic_logs)
def logistic_logs_samples(generator: torch.Generator) -> Iterator[tuple[Tensor]]:
    for dtype in (torch.float32, torch.float64):
        yield ((torch.randn(3, 7, generator=generator, dtype=dtype) * 30).requires_grad_(),)


@sampled(logistic_threshold)
def logistic_threshold_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 30, generator=generator, dtype=dtype)
        tau = torch.rand(4, 1, generator=generator, dtype=dtype) + 0.1
        masked = x.masked_fill(torch.rand(4, 30, generator=generator) < 0.3, -math.inf)
        for scores, k in ((x, [1, 5, 10, 20]), (masked, [1, 2, 3, 4]), ((x * 2).round(), [3, 3, 3, 29])):
            yield *centred(scores, torch.tensor(k)), torch.tensor(k), tau


@sampled(tie_ranks)
def tie_ranks_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 20, generator=generator, dtype=dtype)
        labels = torch.randint(3, (4, 20), generator=generator).to(dtype)
        mask = torch.rand(4, 20, generator=generator) > 0.3
        for scores in (x, x.round(), x.masked_fill(x > 1.5, math.nan)):
            yield scores, labels, full_mask(x)
            yield torch.where(mask, scores, 0.0), labels, mask


@sampled(recurrence)
def recurrence_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, bool]]:
    for shape in ((1, 1), (1, 97), (3, 50), (40, 7), (0, 4)):
        for reverse in (False, True):
            a, b = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
            yield a, b, reverse
            yield a.float(), b.float(), reverse


@sampled(sinkhorn_scaling)
def sinkhorn_scaling_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    for dtype in (torch.float32, torch.float64):
        matrix = torch.rand(3, 5, 5, generator=generator, dtype=dtype)
        rows, columns = torch.arange(5).expand(3, 5) < 3, torch.tensor([1, 0, 1, 1, 0]).bool().expand(3, 5)
        yield (matrix * rows[:, :, None] * columns[:, None, :]).requires_grad_(), rows, columns, 20


def sorting_rows(generator: torch.Generator) -> Iterator[Tensor]:
    for dtype in (torch.float32, torch.float64):
        for shape in ((6, 33), (1, 2), (3, 1), (0, 4)):
            x = torch.randn(shape, generator=generator, dtype=dtype)
            yield x
            yield (x * 2).round() / 2
    yield torch.tensor([[math.inf, -math.inf, 0.0, -0.0, math.inf, 1.0]])


@sampled(sort_descending)
def sort_descending_samples(generator: torch.Generator) -> Iterator[tuple[Tensor]]:
    return ((x,) for x in sorting_rows(generator))


@sampled(share_ties)
def share_ties_samples(generator: torch.Generator) -> Iterator[tuple[Tensor]]:
    return ((x.requires_grad_(),) for x in sorting_rows(generator))


@sampled(sorted_descending)
def sorted_descending_samples(generator: torch.Generator) -> Iterator[tuple[Tensor]]:
    for dtype in (torch.float32, torch.float64):
        yield (torch.randint(5, (4, 30), generator=generator).to(dtype),)
        yield (torch.empty(0, 3, dtype=dtype),)


@sampled(subset_logs)
def subset_logs_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 11, generator=generator, dtype=dtype)
        mask = torch.rand(4, 11, generator=generator) < 0.8
        yield x.requires_grad_(), torch.tensor([1, 5, 7, 10]), torch.ones_like(mask)
        yield torch.where(mask, x.detach(), 0.0).requires_grad_(), torch.tensor([1, 2, 3, 3]), mask


@sampled(ranks_of_copies)
def ranks_of_copies_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for scores, labels, mask in tie_ranks_samples(generator):
        weights = 3.0 * torch.rand(scores.shape, generator=generator, dtype=scores.dtype)
        yield tie_ranks(scores.detach(), labels, mask), weights * mask


@sampled(weighted_pair)
def weighted_pair_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for scores, _, mask in tie_ranks_samples(generator):
        x = scores.detach()
        for weights in (3.0 * torch.rand(x.shape, generator=generator, dtype=x.dtype), torch.full_like(x, 0.1)):
            held = torch.where(mask & x.isfinite(), weights, 0.0)
            k = held.sum(1) * torch.rand(len(x), generator=generator, dtype=x.dtype).clamp(1e-3, 0.99)
            yield x.masked_fill(held == 0, -math.inf), k, held
        yield x.masked_fill(held == 0, -math.inf), 0.1 * (held > 0).sum(1).div(2).ceil(), held  # ten times .1 is 1
