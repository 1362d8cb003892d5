"""Ranks that do not depend on the order of the items."""

import torch
from hypothesis import given, settings

from recsys_topk.ops.ranks import tie_ranks
from tests.strategies import lists


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lists())
def test_tie_ranks_are_the_loop(drawn):
    """1 + how many come before, plus half of how many share the place; lower labels come before at equal scores."""
    ranks = tie_ranks(drawn.scores, drawn.labels, drawn.mask)
    for row, valid in enumerate(drawn.mask):
        x, y = drawn.scores[row].tolist(), drawn.labels[row].tolist()
        items = [i for i in range(len(x)) if valid[i]]
        for i in items:
            before = sum((-x[j], y[j]) < (-x[i], y[i]) for j in items)
            alike = sum((x[j], y[j]) == (x[i], y[i]) for j in items)
            assert ranks[row, i] == 1 + before + (alike - 1) / 2


def test_a_constant_model_still_has_pairs_to_swap():
    labels = torch.tensor([[1.0, 0.0, 0.0]])
    assert tie_ranks(torch.zeros(1, 3), labels, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[3.0, 1.5, 1.5]]
