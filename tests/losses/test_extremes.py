"""Regression tests of losses on extreme lists."""

import torch

from recsys_topk.losses import ApproxNDCGLoss, ListNetLoss


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


def test_listnet_is_accurate_for_millions_of_items():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 4_000_000, generator=generator)
    labels = torch.randint(0, 5, scores.shape, generator=generator).float()
    exact = ListNetLoss()(scores.double(), labels)
    torch.testing.assert_close(ListNetLoss()(scores, labels).double(), exact, rtol=1e-5, atol=0)
