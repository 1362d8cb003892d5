"""`softmax_at_k` trains from scratch: the gradient raises the positives, and they end above the negatives."""

import pytest
import torch

from recsys_topk.losses import SoftmaxAtKLoss, get


@pytest.mark.parametrize("positives", [1, 5, 12])
def test_gradient_raises_positives_of_a_constant_model(positives):
    scores = torch.zeros(1, 15, requires_grad=True)
    labels = (torch.arange(15) < positives).float()[None]
    (gradient,) = torch.autograd.grad(SoftmaxAtKLoss(k=5)(scores, labels), scores)
    assert (gradient[0, :positives] < 0).all()
    assert (gradient[0, positives:] > 0).all()
    # With the weight differentiated, as in the paper, the gradient lowers the positives.
    (paper,) = torch.autograd.grad(SoftmaxAtKLoss(k=5, weight_gradient=True)(scores, labels), scores)
    assert (paper[0, :positives] > 0).all()


def auc_after_training(loss):
    """Return the share of pairs in order after a linear model was trained from zero on lists with many positives."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(200, 15, 8, generator=draw)
    labels = (features @ torch.randn(8, generator=draw) + 2.0 * torch.randn(200, 15, generator=draw) > -2.5).float()
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(features).squeeze(-1), labels).backward()
        optimizer.step()
    scores = model(features).squeeze(-1)
    pairs = labels[:, :, None] > labels[:, None, :]
    return float((scores[:, :, None] > scores[:, None, :])[pairs].float().mean())


def test_training_from_scratch_reaches_the_auc_of_softmax():
    ours, softmax = auc_after_training(SoftmaxAtKLoss(k=5)), auc_after_training(get("softmax"))
    assert softmax > 0.75
    assert ours > softmax - 0.02
    assert auc_after_training(SoftmaxAtKLoss(k=5, weight_gradient=True)) < 0.5
