"""NeuralNDCG: one minus NDCG with NeuralSort's relaxed permutation, scaled by Sinkhorn iterations."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import is_float32, is_real, operation
from recsys_topk.ops.losses.arf_terms import neuralsort_matrix
from recsys_topk.ops.losses.known_gradient import known_gradient
from recsys_topk.ops.selection import sinkhorn_scaling
from recsys_topk.ops.selection.count_true import count_true

ROWS = 12  # of the buffer of the compiled loop, beside the matrix and the factors of the rounds
LONGEST = 2048  # more items use the reference: the compiled loop keeps a matrix of a list per thread

_LISTS = Loop("recsys_topk.ops.backends.compiled.neural:neural_ndcg_lists")


@operation
def neural_ndcg(scores: Tensor, gains: Tensor, discounts: Tensor, mask: Tensor, tau: float, rounds: int) -> Tensor:
    """Return max(0, 1 - sum_r D_r sum_i P_ri G_i) of each list, (B,); see `recsys_topk.losses.neural_ndcg`.

    Args:
        scores: (B, N), 0 where masked.
        gains: G, (B, N), 0 where masked.
        discounts: D, (B, N), by rank.
        mask: Boolean (B, N).
        tau: Temperature.
        rounds: Maximum number of Sinkhorn iterations.
    """
    count, places = count_true(mask), torch.arange(1, scores.shape[1] + 1, device=scores.device)
    matrix = neuralsort_matrix(scores, mask, count, places, tau)
    ranks, items = sinkhorn_scaling.sinkhorn_scaling(matrix, places <= count[:, None], mask, rounds)
    at_place = (matrix @ (items * gains)[:, :, None])[:, :, 0]
    return (1.0 - (ranks * discounts * at_place).sum(-1)).clamp_min(0.0)


def _serves(scores: Tensor, gains: Tensor, discounts: Tensor, mask: Tensor, tau: float, rounds: int) -> bool:
    return is_float32(scores, gains, discounts) and is_real(mask) and 0 < scores.shape[1] <= LONGEST and len(scores) > 0


@neural_ndcg.backend("numba", _serves)
def _numba(scores: Tensor, gains: Tensor, discounts: Tensor, mask: Tensor, tau: float, rounds: int) -> Tensor:
    lists, n = scores.shape
    x = scores.detach().contiguous()
    real = None if is_full(mask) else mask.contiguous()
    value = torch.empty(lists)
    gradient = torch.empty(lists, n) if scores.requires_grad and torch.is_grad_enabled() else None
    size = -(-n // (2 * WIDTH)) * 2 * WIDTH
    buffers = torch.empty(number_of_parts(lists), ROWS + size + 4 * rounds + 2, size)
    given = (x, real, gains.contiguous(), discounts.contiguous(), 1.0 / tau, rounds, sinkhorn_scaling.TOLERANCE)
    run_parts(_LISTS, lists, n, *given, buffers, size, value, gradient)
    return known_gradient(
        scores, value, gradient, lambda x: neural_ndcg.reference(x, gains, discounts, mask, tau, rounds)
    )
