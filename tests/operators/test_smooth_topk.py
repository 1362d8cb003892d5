"""Smooth top-k against the authors' code and against sums over all subsets, written out."""

import itertools

import pytest
import torch
from torch.nn.functional import one_hot

from recsys_topk.losses import SmoothTopKSVMLoss
from recsys_topk.operators import SmoothTopK
from tests.operators.peer_vectors import load, tensors
from tests.peers import cases


def by_enumeration(scores, k):
    """Return the memberships of one list, (N,), from the weights of all subsets."""
    subsets = torch.tensor(list(itertools.combinations(range(len(scores)), k)))
    shares = scores[subsets].sum(1).softmax(0)
    return torch.zeros_like(scores).index_add(0, subsets.flatten(), shares.repeat_interleave(k))


@pytest.mark.parametrize("case", load("op_smooth_topk_esp_ovalgroup")["cases"], ids=lambda case: case["name"])
def test_membership_matches_the_authors_code(case):
    scores, mask = tensors(case)
    p = SmoothTopK()(scores, case["k"], mask).p
    torch.testing.assert_close(p, torch.tensor(case["soft_selection"], dtype=torch.float64), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_value_and_gradient_match_the_sum_over_subsets(tau):
    scores = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    ks, keep = torch.tensor([1, 3, 4, 2]), torch.ones(4, 8, dtype=torch.bool)
    keep[2, [1, 5]] = keep[3, [0, 2, 3, 4, 7]] = False
    p = SmoothTopK(tau)(scores, ks, keep).p
    expected = torch.zeros_like(p)
    for row, k in enumerate(ks.tolist()):
        expected[row, keep[row]] = by_enumeration(scores[row, keep[row]] / tau, k)
    torch.testing.assert_close(p, expected, atol=1e-12, rtol=1e-10)
    weights = torch.cos(torch.arange(32.0, dtype=torch.float64)).view(4, 8)
    slopes = [torch.autograd.grad((values * weights).sum(), scores)[0] for values in (p, expected)]
    torch.testing.assert_close(*slopes, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(("k", "size"), [(3, 0.0), (150, 0.0), (150, 1.0), (297, 30.0)])
def test_float32_agrees_with_float64_on_long_lists(k, size):
    """There are 1e89 ways to choose 150 of 300 items, and products of exponentials reach e^9000."""
    x = size * torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    single, double = SmoothTopK()(x, k), SmoothTopK()(x.double(), k)
    torch.testing.assert_close(single.p.double(), double.p, atol=2e-6, rtol=0.0)
    torch.testing.assert_close(single.log_p.double(), double.log_p, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(single.log_q.double(), double.log_q, atol=1e-4, rtol=1e-5)
    assert (single.p.double().sum(1) - k).abs().max() <= 8 * 300 * 2.0**-23


@pytest.mark.parametrize("case", cases("loss_smooth_topk_svm_ovalgroup"), ids=lambda case: case.name)
def test_svm_loss_matches_the_authors_code(case):
    """One positive per list. For the third list of large scores, their code uses the hard loss, the limit tau -> 0."""
    labels = one_hot(torch.tensor(case.raw["target_index"]), case.scores.shape[1])
    losses = SmoothTopKSVMLoss(k=case.k, reduction="none")(case.scores, labels)
    if case.name == "open_large_scores":
        hard = SmoothTopKSVMLoss(tau=1e-5, k=case.k, reduction="none")(case.scores, labels)
        losses = torch.stack((*losses[:2], hard[2]))
    case.assert_agrees(losses.mean())


def test_svm_loss_is_the_mean_over_the_true_top_k():
    scores = torch.randn(1, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[3, 0, 2, 0, 1, 1, 0, 0, 0]])
    alone = [SmoothTopKSVMLoss(k=2, margin=0.3)(scores, one_hot(torch.tensor([i]), 9)) for i in (0, 2)]
    both = SmoothTopKSVMLoss(k=2, margin=0.3)(scores, labels)
    torch.testing.assert_close(both, torch.stack(alone).mean())
