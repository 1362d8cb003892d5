"""Ranks that do not depend on the order of the items."""

import pytest
import torch
from hypothesis import given, settings

from recsys_topk.ops.dispatch import installed
from recsys_topk.ops.selection.ranks import tie_ranks
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


@pytest.mark.skipif(not installed("numba"), reason="the compiled loops need numba")
@pytest.mark.parametrize("scores", [1, 4, 1000], ids="{} different scores".format)
@pytest.mark.parametrize("labels", [1, 2, 1000], ids="{} different labels".format)
def test_ties_are_ranked_without_the_reference(scores: int, labels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tie must not send the batch to the reference, which takes two to four times as long."""
    monkeypatch.delattr(tie_ranks, "reference")
    generator = torch.Generator().manual_seed(scores + labels)
    x = torch.randint(scores, (5, 77), generator=generator) - 2.0
    y = torch.randint(labels, (5, 77), generator=generator).float()
    mask = torch.rand(5, 77, generator=generator) > 0.3
    ahead, tied = x[:, :, None] < x[:, None, :], x[:, :, None] == x[:, None, :]
    before = ahead | (tied & (y[:, :, None] > y[:, None, :]))
    alike = tied & (y[:, :, None] == y[:, None, :])
    for valid in (mask, torch.ones_like(mask)):
        counts = [(pairs & valid[:, None]).sum(2) for pairs in (before, alike)]
        expected = counts[0] + (counts[1] + 1) / 2
        ranks = tie_ranks(x, y, valid)
        torch.testing.assert_close(ranks[valid], expected[valid], rtol=0, atol=0)
