"""Regression tests of losses on extreme lists."""

import torch

from recsys_topk.losses import ApproxNDCGLoss


def test_approx_ndcg_with_k_at_least_the_list_length_equals_no_k():
    scores = 0.01 * torch.randn(256, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 4, (256, 10), generator=torch.Generator().manual_seed(1)).float()
    results = []
    for k in (None, 10, 12, torch.full((256,), 10)):
        x = scores.clone().requires_grad_()
        value = ApproxNDCGLoss(tau=0.1, k=None, reduction="none")(x, labels, k=k)
        results.append((value.detach(), torch.autograd.grad(value.sum(), x)[0]))
    for value, gradient in results[1:]:
        torch.testing.assert_close(value, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])
