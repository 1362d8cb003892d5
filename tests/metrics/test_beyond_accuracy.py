"""Coverage, Gini, novelty, popularity and diversity against loops and against values of RecTools 0.19."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recsys_topk.metrics.functional import (
    catalogue_coverage,
    gini,
    intra_list_diversity,
    mean_novelty,
    mean_popularity,
)

PEER = json.loads((Path(__file__).parents[1] / "fixtures" / "rectools" / "values.json").read_text())


def padded(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return lists as a matrix with padding in any place, and its mask."""
    width = max(map(len, lists)) + 1
    rows, mask = torch.zeros(len(lists), width, dtype=torch.int64), torch.zeros(len(lists), width, dtype=torch.bool)
    for number, items in enumerate(lists):
        start = number % (width - len(items) + 1)
        rows[number, start : start + len(items)] = torch.tensor(items, dtype=torch.int64)
        mask[number, start : start + len(items)] = True
    return rows, mask


def test_values_equal_those_of_rectools() -> None:
    rows, mask = padded([items[: PEER["k"]] for items in PEER["lists"]])
    earlier, there = padded(PEER["histories"])
    counts = torch.bincount(earlier[there], minlength=PEER["items"])
    genres, present = padded(PEER["genres"])
    year = torch.tensor(PEER["year"])[:, None]
    exposure = torch.bincount(rows[mask], minlength=PEER["items"])
    assert counts.min() == 0  # some items are new
    found = {
        "novelty": mean_novelty(counts[rows], mask, users=len(PEER["histories"])),
        "popularity": mean_popularity(counts[rows], mask),
        "popularity_of_histories": mean_popularity(counts[earlier], there),
        "diversity_year": intra_list_diversity(year[rows], torch.ones_like(mask)[..., None], mask),
        "diversity_genres": intra_list_diversity(genres[rows], present[rows], mask),
    }
    assert float(catalogue_coverage(exposure)) == pytest.approx(PEER["values"]["coverage"], abs=1e-9)
    for name, (values, counted) in found.items():
        assert counted.all()
        assert values.tolist() == pytest.approx(PEER["values"][name], abs=1e-9), name


def test_gini_equals_the_mean_absolute_difference() -> None:
    for seed in range(5):
        exposure = torch.randint(0, 9, (17,), generator=torch.Generator().manual_seed(seed))
        pairs = sum(abs(a - b) for a, b in itertools.product(exposure.tolist(), repeat=2))
        expected = pairs / (2 * 17 * int(exposure.sum()))
        assert float(gini(exposure)) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(float(gini(torch.zeros(3))))


def test_diversity_equals_a_loop_over_pairs_of_sets() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(0, 5, (6, 7, 3), generator=draw)  # repeated values, and 0 = padding
    mask = torch.rand(6, 7, generator=draw) < 0.6
    mask[0] = False
    mask[1], mask[1, 3] = False, True
    found, counted = intra_list_diversity(values, values > 0, mask)
    for b in range(6):
        sets = [set(values[b, i][values[b, i] > 0].tolist()) for i in range(7) if mask[b, i]]
        pairs = [1 - len(x & y) / len(x | y) if x | y else 0.0 for x, y in itertools.combinations(sets, 2)]
        assert bool(counted[b]) == bool(sets)
        assert float(found[b]) == pytest.approx(sum(pairs) / len(pairs) if pairs else 0.0, abs=1e-12)


def test_empty_lists_are_not_counted() -> None:
    mask = torch.tensor([[False, False], [True, False]])
    counts = torch.tensor([[5, 5], [4, 1000]])
    for values, counted in (mean_popularity(counts, mask), mean_novelty(counts, mask, users=8)):
        assert counted.tolist() == [False, True]
        assert float(values[0]) == 0.0
    assert mean_novelty(counts, mask, users=8)[0].tolist() == [0.0, 1.0]
