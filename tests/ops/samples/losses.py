"""Arguments of the operations of `recsys_topk.ops.losses` for the comparison of their backends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recsys_topk.numerics import full_mask
from recsys_topk.ops.losses.arf_terms import arf_terms
from recsys_topk.ops.losses.dcg import discount, mean_discounts
from recsys_topk.ops.losses.find_positives import find_positives
from recsys_topk.ops.losses.joint_terms import JointTask, joint_terms
from recsys_topk.ops.losses.neural_ndcg import neural_ndcg
from recsys_topk.ops.losses.pair_sums import Kind, PairWeights, count_pairs, pair_sums
from recsys_topk.ops.losses.plackett_luce import plackett_luce
from recsys_topk.ops.losses.soft_ranks import rank_gradient, rank_values, soft_ranks
from recsys_topk.ops.losses.survival import survival_logs
from recsys_topk.ops.losses.topk_loss import topk_loss
from recsys_topk.ops.losses.topk_target import best_positives, topk_target
from recsys_topk.ops.selection.membership import Law
from recsys_topk.ops.selection.ranks import tie_ranks, weighted_ranks
from tests.ops.samples.registry import sampled
from tests.ops.samples.selection import ranks_of_copies_samples


@sampled(arf_terms)
def arf_terms_samples(
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, float, bool]]:
    for dtype in (torch.float32, torch.float64):
        for n in (6, 35):
            x = torch.randn(4, n, generator=generator, dtype=dtype)
            labels = torch.randint(0, 3, (4, n), generator=generator).to(dtype)
            mask = torch.rand(4, n, generator=generator) > 0.3
            mask[:, 0] = True
            target, quota = (labels > 1).to(dtype), torch.tensor([1, 2, 3, 4])
            for both in (False, True):
                yield x.clone().requires_grad_(), labels, full_mask(x), target, quota, 0.5, 1e-6, both
                yield torch.where(mask, x, 0.0).requires_grad_(), labels, mask, target * mask, quota, 1.0, 1e-6, both


@sampled(find_positives)
def find_positives_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None, float]]:
    for shape in ((3, 5), (1, 9), (4, 0), (0, 3)):
        labels = torch.randint(4, shape, generator=generator).float()
        yield labels, None, 0.0
        yield labels.double(), torch.rand(shape, generator=generator) > 0.5, 1.5


@sampled(joint_terms)
def joint_terms_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    laws = [Law("dftopk", 0.7), Law("dftopk", 2.0, 0.2), Law("logistic", 0.7), Law("laplace", 0.7)]
    laws += [Law("clip", 4.0), Law("clip", 0.5)]
    for stages, lists, n in ((2, 5, 12), (1, 3, 40), (3, 4, 70)):
        x = torch.randn(stages, lists, n, generator=generator)
        x[:, 1] = x[:, 1].round()
        y = torch.randint(0, 4, (lists, n), generator=generator).float()
        y[0] = 0.0
        mask = torch.rand(lists, n, generator=generator) > 0.3
        weights = torch.randint(0, 4, (lists, n), generator=generator).float()
        quotas = (n - 2, n // 2, 3)[:stages]
        for law in laws:
            # For these scores a clipped membership is 0 or at least 1 / (2 n tau). 1 / p amplifies the rounding of p.
            given = (x * 2).round() / 2 if law.name == "clip" else x
            for scores, real in ((given, None), (given.masked_fill(~mask, math.nan), mask)):
                for k, cuts in ((n // 4, None), (None, None), (2, quotas)):
                    leaves = [one.clone().requires_grad_() for one in scores]
                    yield leaves, JointTask(y, real, k, cuts, 0.0, law)
                leaves = [one.clone().requires_grad_() for one in scores]
                yield leaves, JointTask(y, real, n // 4, quotas, 0.0, law, weights)
    yield [one.double().requires_grad_() for one in x], JointTask(y.double(), None, 3, None, 0.0, laws[0])


@sampled(neural_ndcg)
def neural_ndcg_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, float, int]]:
    for dtype in (torch.float32, torch.float64):
        for n in (6, 35):
            x = torch.randn(4, n, generator=generator, dtype=dtype)
            mask = torch.rand(4, n, generator=generator) > 0.3
            mask[:, 0] = True
            gains = torch.rand(4, n, generator=generator, dtype=dtype) / n
            discounts = torch.linspace(1, 0, n, dtype=dtype).expand(4, n)
            yield x.clone().requires_grad_(), gains, discounts, full_mask(x), 0.5, 20
            yield torch.where(mask, x, 0.0).requires_grad_(), gains * mask, discounts, mask, 1.0, 3


def pair_sums_orders(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for lists, n in ((3, 7), (2, 40)):
        for dtype in (torch.float32, torch.float64):
            values = torch.randint(0, 4, (lists, n), generator=generator).to(dtype)
            mask = torch.rand(lists, n, generator=generator) > 0.2
            x = torch.randn(lists, n, generator=generator, dtype=dtype)
            yield x, values.masked_fill(~mask | (values == 0), -math.inf), values.masked_fill(~mask, math.inf)


@sampled(pair_sums)
def pair_sums_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, PairWeights, float]]:
    for x, first, second in pair_sums_orders(generator):
        x[0] = x[0].round()  # many ties
        x[1] *= 100.0
        for one in (x, first, second):  # one tie
            one[-1, 1] = one[-1, 0]
        ranks = tie_ranks(x, second, second < math.inf)
        d = discount(ranks, x.dtype)
        ks = torch.randint(1, 6, x.shape[:1], generator=generator)
        items = (second < math.inf) * torch.rand(x.shape, generator=generator, dtype=x.dtype).mul(4.0)
        uneven = weighted_ranks(x, second, second < math.inf, items)
        kinds: tuple[Kind, ...] = ("ones", "differences")
        for kind in kinds:
            for weights in (
                PairWeights(first, second, kind),
                PairWeights(first, second, kind, d),
                PairWeights(first, second, kind, d, ranks, 10.0),
                PairWeights(first, second, kind, None, ranks, 1.0, 3),
                PairWeights(first, second, kind, d, ranks, 2.0, ks),
                PairWeights(first, second, kind, items=items),
                PairWeights(first, second, kind, d, items=items),
                PairWeights(first, second, kind, None, uneven, 1.0, None, items),
                PairWeights(first, second, kind, discount(uneven, x.dtype), uneven, 10.0, 2.5 * ks, items),
            ):
                yield x.clone().requires_grad_(), weights, 1.5
        for weights in (None, items):
            yield x.clone().requires_grad_(), PairWeights(first.clamp_min(0.0), second, "rows", items=weights), 1.0


@sampled(mean_discounts)
def mean_discounts_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    for number, (ranks, weights) in enumerate(ranks_of_copies_samples(generator)):
        yield ranks, weights, None
        yield ranks, weights, 5.0 * torch.rand(len(ranks), generator=generator, dtype=ranks.dtype)
        yield ranks, weights * (4e4 if number == 0 else 0.0), None


@sampled(count_pairs)
def count_pairs_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    for _, first, second in pair_sums_orders(generator):
        yield first, second
        yield first, second, torch.rand(first.shape, generator=generator, dtype=first.dtype)


@sampled(plackett_luce)
def plackett_luce_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    for dtype in (torch.float32, torch.float64):
        for n, scale in ((7, 1.0), (40, 10.0), (40, 100.0)):
            x = scale * torch.randn(3, n, generator=generator, dtype=dtype)
            labels = torch.randint(0, 4, (3, n), generator=generator).to(dtype)
            mask = torch.rand(3, n, generator=generator) > 0.3
            yield x.clone().requires_grad_(), labels, labels > 0, full_mask(x)
            yield torch.where(mask, x, 0.0).requires_grad_(), labels, mask & (labels > 0), mask
            weights = mask * 2.0 * torch.rand(3, n, generator=generator, dtype=dtype)
            yield torch.where(mask, x, 0.0).requires_grad_(), labels, mask & (labels > 0), mask, weights


@sampled(soft_ranks)
def soft_ranks_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, float, Tensor | None]]:
    for dtype in (torch.float32, torch.float64):
        for n in (7, 40):
            x = torch.randn(3, n, generator=generator, dtype=dtype)
            x[0] *= 100.0
            mask = torch.rand(3, n, generator=generator) > 0.3
            for wanted in (torch.rand(3, n, generator=generator) > 0.7, full_mask(x)):
                weights = mask * 2.0 * torch.rand(3, n, generator=generator, dtype=dtype)
                yield x.clone().requires_grad_(), wanted, full_mask(x), 0.5, None
                for given in (None, weights):
                    yield torch.where(mask, x, 0.0).requires_grad_(), wanted & mask, mask, 2.0, given


@sampled(rank_values)
def rank_values_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor, float, Tensor | None]]:
    return ((x.detach(), *rest) for x, *rest in soft_ranks_samples(generator))


@sampled(rank_gradient)
def rank_gradient_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    for x, wanted, mask, *rest in rank_values_samples(generator):
        yield x, wanted, mask, torch.cos(x), *rest


@sampled(survival_logs)
def survival_logs_samples(generator: torch.Generator) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    z = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    yield list(torch.nn.functional.logsigmoid(z)), list(torch.nn.functional.logsigmoid(-z))


@sampled(topk_loss)
def topk_loss_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    laws = [Law("dftopk", 0.7), Law("dftopk", 2.0, 0.2), Law("logistic", 0.7), Law("laplace", 0.7)]
    laws += [Law("clip", 2.0), Law("fenchel_young", 2.0)]
    for lists, n in ((5, 12), (30, 300), (2, 2)):
        x = torch.randn(lists, n, generator=generator)
        x[1] = x[1].round()
        y = torch.randint(0, 4, (lists, n), generator=generator).float()
        y[0] = 0.0
        mask = torch.rand(lists, n, generator=generator) > 0.3
        junk = x.masked_fill(~mask, math.nan)
        ks = torch.randint(0, n + 1, (lists,), generator=generator)
        weights = torch.randint(0, 4, (lists, n), generator=generator) * torch.rand(lists, 1, generator=generator)
        for law in laws:
            if law.name == "clip" and n > 100:  # some p are so small that 1 / p amplifies their rounding
                continue
            for mean in (True, False):
                yield x.clone().requires_grad_(), y, None, 1, 1.0, law, mean
                yield x.clone().requires_grad_(), y, None, None, 0.0, law, mean
                yield junk.clone().requires_grad_(), y, mask, ks, 0.0, law, mean
                yield junk.clone().requires_grad_(), y, mask, max(1, n // 4), 2.0, law, mean
                yield junk.clone().requires_grad_(), y, mask, max(1, n // 4), 0.0, law, mean, weights
                yield x.clone().requires_grad_(), y, None, 0.3 * ks, 0.0, law, mean, weights
                if law.name not in ("clip", "fenchel_young"):
                    for others in (0.0, 0.3):
                        alone = law._replace(others=others)
                        yield junk.clone().requires_grad_(), y, mask, max(1, n // 4), 0.0, alone, mean, weights
    yield x.double().requires_grad_(), y.double(), None, 1, 0.0, laws[0], True


@sampled(topk_target)
def topk_target_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, int | Tensor, float]]:
    for dtype in (torch.float32, torch.float64):
        for shape in ((5, 30), (1, 3), (0, 4)):
            for grades in (2, 6):
                labels = torch.randint(grades, shape, generator=generator).to(dtype)
                ks = torch.randint(0, 4, shape[:1], generator=generator)
                for mask in (full_mask(labels), torch.rand(shape, generator=generator) > 0.4):
                    yield labels, mask, 2, 0.0
                    yield labels, mask, ks, 1.0


@sampled(best_positives)
def best_positives_samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, int | Tensor]]:
    for labels, mask, k, above in topk_target_samples(generator):
        positive = mask & (labels > above)
        yield labels, positive, k
