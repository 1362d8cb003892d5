"""Corrections for sampled negatives against enumeration of all draws or subsets, and against integrals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_negatives import batch_of, catalogue_of, check

from recsys_topk.cascades.sampled_negatives import pool_weights
from recsys_topk.datamodules.negatives.expansion import check_mix, expand
from recsys_topk.datamodules.negatives.inclusion import log_inclusion
from recsys_topk.losses import SoftmaxLoss

WEIGHTS = [5, 3, 1, 1]  # of the items that can be drawn; the list's own items have weight 2
VALUES = [0.7, 1.3, 4.0, 0.2]


@pytest.mark.parametrize(
    ("share", "tries", "waited"),
    [
        (0.9, 2, 0.0),
        (0.5, 3, 0.0),
        (0.1, 20, 0.0),
        (1e-3, 500, 0.0),
        (1e-5, 40, 0.0),
        (0.02, 150, 30.0),
        (1e-4, 200, 5),
    ],
)
def test_series_equals_the_mean_over_the_time_of_the_last_draw(share: float, tries: int, waited: float) -> None:
    """E[1 / (1 - exp(-p (G + t)))] for G of distribution Gamma(M), by a sum over a fine grid of G."""
    spread = 12 * math.sqrt(tries) + 40
    g = np.linspace(max(1e-9, tries - spread), tries + spread, 200_001)
    density = np.exp((tries - 1) * np.log(g) - g - math.lgamma(tries))
    expected = np.trapezoid(density / -np.expm1(-share * (g + waited)), g)
    found = log_inclusion(torch.tensor([[share]]).double(), torch.tensor([tries]), torch.tensor([waited]).double())
    assert math.exp(-float(found)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_weighting_by_inclusion_probability_is_unbiased_by_enumeration(number: int) -> None:
    """Enumerate all sequences of draws: which items are accepted in which order, after how many draws."""
    total, longest = sum(WEIGHTS) + 2, 200
    share = torch.tensor(WEIGHTS).double().expand(longest, -1) / total
    weight = torch.exp(-log_inclusion(share, torch.arange(longest), torch.zeros(longest))).tolist()
    chance: dict[tuple[int, ...], float] = {(): 1.0}  # probability of the accepted items, in order, after some draws
    estimate, mass = 0.0, 0.0
    for draws in range(1, longest):
        following: dict[tuple[int, ...], float] = {}
        for accepted, probability in chance.items():
            rejected = (2 + sum(WEIGHTS[i] for i in accepted)) / total
            following[accepted] = following.get(accepted, 0.0) + probability * rejected
            for item in set(range(len(WEIGHTS))) - set(accepted):
                reached, now = (*accepted, item), probability * WEIGHTS[item] / total
                if len(reached) <= number:
                    following[reached] = following.get(reached, 0.0) + now
                    continue
                estimate += now * sum(VALUES[i] * weight[draws][i] for i in accepted)
                mass += now
        chance = following
    assert mass == pytest.approx(1.0, abs=1e-6)
    assert estimate == pytest.approx(sum(VALUES), rel=1e-5)


def test_corrected_softmax_over_uniform_negatives_equals_full_softmax_in_the_mean() -> None:
    """Average the partition function of the corrected softmax over every set that can be drawn."""
    generator = torch.Generator().manual_seed(0)
    scores, tau, items, number = torch.randn(7, generator=generator).double(), 0.7, 7, 3
    before = batch_of([[0, 2]]).replace(labels=torch.tensor([[1.0, 0.0]]))
    excluded = torch.tensor([[5, -1, 5]])
    after = expand(before, number, seed=0, group=1, catalogue=catalogue_of(items), excluded=excluded, log_q=True).batch
    log_q = after.log_q[0]
    assert log_q[:2].eq(0).all()
    assert log_q[2:].exp().tolist() == pytest.approx([number / 4] * number)
    loss, partitions = SoftmaxLoss(tau=tau), []
    for drawn in itertools.combinations((1, 3, 4, 6), number):
        x = scores[[0, 2, *drawn]][None]
        labels = torch.tensor([[1.0, 0, 0, 0, 0]]).double()
        value = loss(loss.correct_sampling(x, log_q[None].double()), labels)
        partitions.append(math.exp(float(value) + float(scores[0]) / tau))
    candidates = [0, 1, 2, 3, 4, 6]
    assert np.mean(partitions) == pytest.approx(float((scores[candidates] / tau).exp().sum()), rel=1e-6)


@pytest.mark.parametrize(
    "source",
    [
        "uniform",
        "popularity",
        "in_batch",
        {"in_batch": 2, "uniform": 2},
        {"uniform": 1, "popularity": 3},
        {"popularity": 1, "in_batch": 1, "uniform": 1},
    ],
    ids=str,
)
def test_sampled_sums_estimate_the_sum_over_all_items(source: Any) -> None:
    """Over many lists drawn as in training, the mean of sum f_j / q_j is the sum of f over all drawable items.

    The weights of a pool of twice or a third of the catalogue's size estimate twice or a third of it.
    """
    lists, items = 8_000, 9
    rng = np.random.default_rng(1)
    own = rng.choice(items, lists, p=np.arange(1, items + 1) / 45)
    before = batch_of([[int(item)] for item in own])
    before = before.replace(request_id=torch.arange(lists))
    counts = torch.bincount(before.item_id[before.candidates[:, 0]], minlength=items)
    number = 3 if isinstance(source, str) else sum(source.values())
    excluded = torch.full((lists, 1), 4)
    options: dict[str, Any] = {"source": source, "catalogue": catalogue_of(items, counts), "excluded": excluded}
    after = expand(before, number, seed=5, group=1, log_q=True, **options).batch
    check(before, after, number, 1)
    f = torch.linspace(0.5, 3.0, items).double()
    drawn, mask = after.item_id[after.candidates[:, 1:]], after.mask[:, 1:]
    assert not (drawn == 4)[mask].any()
    weights = pool_weights(after, "catalogue").double()
    for pool in (2 * items, items // 3):
        torch.testing.assert_close(pool_weights(after, pool).double()[:, 1:], weights[:, 1:] * pool / items)
        assert pool_weights(after, pool)[:, 0].eq(1).all()
    estimates = torch.where(mask, f[drawn] * weights[:, 1:], 0.0).sum(1)
    truth = f.sum() - f[4] - torch.where(before.candidates[:, 0] == 4, 0.0, f[before.item_id[before.candidates[:, 0]]])
    error = estimates - truth
    assert float(error.mean().abs()) < 4.5 * float(error.std()) / math.sqrt(lists) + 1e-3


def test_correction_by_the_expected_count_is_biased() -> None:
    """A popular item is drawn at most once, so n q_j overstates its probability and the sum is too small."""
    weights = torch.tensor([80, 10, 5, 3, 2])
    before = batch_of([[9]] * 4000).replace(request_id=torch.arange(4000))
    counts = torch.cat([weights, torch.zeros(5, dtype=torch.int64)])
    after = expand(
        before, 3, seed=0, group=1, source="popularity", catalogue=catalogue_of(10, counts), log_q=True
    ).batch
    drawn = after.item_id[after.candidates[:, 1:]]
    ours = torch.exp(-after.log_q[:, 1:].double()).sum(1).mean()
    usual = (1 / (3 * weights.double()[drawn] / 100)).sum(1).mean()
    assert float(ours) == pytest.approx(5.0, rel=0.05)
    assert float(usual) != pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("source", ["uniform", "popularity"])
def test_correction_is_zero_if_all_items_are_drawn(source: Any) -> None:
    before = batch_of([[1, 2], [3, 0]])
    catalogue = catalogue_of(14, torch.arange(1, 15))
    after = expand(before, 12, seed=0, group=1, source=source, catalogue=catalogue, log_q=True).batch
    assert after.mask.all()
    assert after.log_q.abs().max() < 1e-6


def test_mix_of_sources_draws_distinct_items_in_the_given_numbers() -> None:
    lists = [[0, 1], [2, 3], [4, 5], [6, 7]] * 8
    before = batch_of(lists)
    parts: Any = {"in_batch": 3, "popularity": 2, "uniform": 4}
    catalogue = catalogue_of(40, torch.arange(40))
    after = expand(before, 9, seed=1, group=1, source=parts, catalogue=catalogue).batch
    check(before, after, 9, 1)
    assert after.mask.all()
    assert after.sampled == 9
    drawn = after.item_id[after.candidates[:, 2:]]
    assert drawn[:, :3].max() < 8
    again = expand(before, 9, seed=1, group=1, source=parts, catalogue=catalogue).batch
    assert torch.equal(again.item_id[again.candidates], after.item_id[after.candidates])


def test_invalid_mix_raises() -> None:
    with pytest.raises(ValueError, match=r"negative_source must be one of in_batch, .*, got 'hard'"):
        check_mix("hard", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"how many negatives come from in_batch.*got 'hard': 3"):
        check_mix({"hard": 3}, 0)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="must add up to 4 negatives"):
        expand(batch_of([[1, 2]]), 4, seed=0, group=1, source={"uniform": 3}, catalogue=catalogue_of(9))


def test_correction_is_unbiased_if_a_race_replaces_rejection() -> None:
    """One item has nearly all tickets, so the other items are drawn by the race."""
    lists, counts = 6_000, torch.tensor([4000, 1, 2, 1, 0])
    before = batch_of([[4]] * lists).replace(request_id=torch.arange(lists))
    after = expand(before, 2, seed=3, group=1, source="popularity", catalogue=catalogue_of(5, counts), log_q=True).batch
    f = torch.tensor([0.3, 2.0, 1.0, 0.5, 9.0]).double()
    drawn = after.item_id[after.candidates[:, 1:]]
    assert after.mask.all()
    error = (f[drawn] * torch.exp(-after.log_q[:, 1:].double())).sum(1) - f[:4].sum()
    assert float(error.mean().abs()) < 4.5 * float(error.std()) / math.sqrt(lists)
    assert float(error.std()) / math.sqrt(lists) < 0.1
