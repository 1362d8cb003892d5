"""NeuralNDCG against allRank, and against its definition written out with the whole matrix."""

import pytest
import torch

from recsys_topk.losses import NeuralNDCGLoss
from recsys_topk.ops.selection import sinkhorn_scaling
from tests.peers import cases

FILES = ("neuralndcg_allrank", "neuralndcg_transposed_allrank", "neuralndcg_atk_allrank")


def permutations(scores, mask, rows):
    """NeuralSort with the rows `rows`, then Sinkhorn until the whole batch has converged, as the peer does."""
    lists, n = scores.shape
    matrix = torch.zeros(lists, n, n, dtype=scores.dtype)
    for one, (x, valid, kept) in enumerate(zip(scores, mask, rows, strict=True)):
        count, x = int(valid.sum()), x[valid]
        slopes = torch.tensor([count - 1.0 - 2.0 * r if r < count else 0.0 for r in range(n)], dtype=x.dtype)
        logits = slopes[kept][:, None] * x - (x[:, None] - x).abs().sum(1)
        matrix[one][kept[:, None] & valid] = logits.softmax(1).flatten()
    rounds = 0
    while rounds < 50:
        matrix = matrix / torch.where(mask, matrix.sum(1), 1.0)[:, None, :]
        matrix = matrix / torch.where(rows, matrix.sum(2), 1.0)[:, :, None]
        rounds += 1
        if (matrix.sum(1) - mask.double()).abs().max() < 1e-6:
            break
    return matrix, rounds


def ndcg(case, matrix, k):
    discounts = 1.0 / torch.log2(2.0 + torch.arange(case.scores.shape[1], dtype=torch.float64))
    discounts[len(discounts) if k is None else k :] = 0.0
    gains = torch.where(case.mask, torch.exp2(case.labels) - 1.0, 0.0)
    best = (gains.sort(1, descending=True).values * discounts).sum(1)
    return ((matrix @ gains[:, :, None])[:, :, 0] * discounts).sum(1) / best


def all_cases():
    return [pytest.param(file, case, id=f"{file}-{case.name}") for file in FILES for case in cases(file)]


@pytest.mark.parametrize(("file", "case"), all_cases())
def test_value_and_gradient_match_allrank(file, case, monkeypatch):
    """The peer stops when the whole batch has converged. Our loss stops list by list, which is switched off here."""
    k = case.k if "atk" in file else None
    first = torch.arange(case.scores.shape[1]) < case.mask.sum(1, keepdim=True)
    if case.name == "open_masked_scattered":
        # The peer drops the rows of the matrix whose index is that of a masked item; the definition with these rows.
        case.assert_agrees(-ndcg(case, permutations(case.scores, case.mask, case.mask)[0], k).mean())
    matrix, rounds = permutations(case.scores, case.mask, first)
    expected = ndcg(case, matrix, k)
    monkeypatch.setattr(sinkhorn_scaling, "TOLERANCE", 0.0)
    ours = 1.0 - NeuralNDCGLoss(k=k, rounds=rounds, reduction="none")(case.scores, case.labels, case.mask)
    torch.testing.assert_close(ours, expected, atol=1e-9, rtol=0.0)
    slopes = [torch.autograd.grad(v.sum(), case.scores, retain_graph=True)[0] for v in (ours, expected)]
    torch.testing.assert_close(*slopes, atol=1e-8, rtol=0.0)
    if case.name != "open_masked_scattered":
        case.assert_agrees(-ours.mean())


def test_slowly_converging_lists_are_accurate_after_50_rounds(monkeypatch):
    """Most lists meet the tolerance of 1e-6 earlier. One of 16 here needs about 200 rounds."""
    for case in cases("neuralndcg_allrank"):
        early = NeuralNDCGLoss(reduction="none")(case.scores, case.labels, case.mask)
        with monkeypatch.context() as patched:
            patched.setattr(sinkhorn_scaling, "TOLERANCE", 0.0)
            late = NeuralNDCGLoss(rounds=500, reduction="none")(case.scores, case.labels, case.mask)
        torch.testing.assert_close(early, late, atol=2e-4, rtol=0.0)


def test_small_temperature_gives_ndcg():
    from recsys_topk.metrics.functional import ndcg_at

    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(8, 30, generator=generator), torch.randint(0, 4, (8, 30), generator=generator).float()
    losses = NeuralNDCGLoss(tau=1e-4, gain="linear", k=7, reduction="none")(scores, labels)
    expected = 1.0 - ndcg_at(scores, labels, k=7, gain="linear")[0]
    torch.testing.assert_close(losses.double(), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("rounds", [0, 1.5, True])
def test_rounds_must_be_a_positive_int(rounds):
    with pytest.raises(ValueError, match="rounds must be a positive int"):
        NeuralNDCGLoss(rounds=rounds)
