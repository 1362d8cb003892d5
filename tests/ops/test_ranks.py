"""Ranks that do not depend on the order of the items."""

import torch
from hypothesis import given, settings

from recsys_topk.ops.ranks import tie_ranks
from tests.strategies import lists


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lists())
def test_tie_ranks_equal_loop(drawn):
    """Rank = 1 + number of items before + half of the other tied items; lower labels come first at equal scores."""
    ranks = tie_ranks(drawn.scores, drawn.labels, drawn.mask)
    for row, valid in enumerate(drawn.mask):
        x, y = drawn.scores[row].tolist(), drawn.labels[row].tolist()
        items = [i for i in range(len(x)) if valid[i]]
        for i in items:
            before = sum((-x[j], y[j]) < (-x[i], y[i]) for j in items)
            alike = sum((x[j], y[j]) == (x[i], y[i]) for j in items)
            assert ranks[row, i] == 1 + before + (alike - 1) / 2


def test_tie_ranks_of_a_constant_model_put_positives_last():
    labels = torch.tensor([[1.0, 0.0, 0.0]])
    assert tie_ranks(torch.zeros(1, 3), labels, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[3.0, 1.5, 1.5]]
