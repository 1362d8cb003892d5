"""The survival loss of an item and its derivative, for the kernels of the joint objective."""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_topk.ops.backends.triton_kernels.rows import CLIP, LAPLACE, log1p_unit, tails


@triton.jit
def one_stage_more(u, survived, failed, LAW: tl.constexpr):  # noqa: N803
    """Return log prod_m p_m and log(1 - prod_m p_m) after one more stage; `survived` and `failed` are those before."""
    log_p, log_q, _, _ = tails(u, LAW)
    if LAW == CLIP:  # p is 1 in a stage that all items survive, and not clamped
        log_p, log_q = tl.where(u < 1e38, log_p, 0.0), tl.where(u < 1e38, log_q, -1e38)
    fails = tl.maximum(log_q, -1e38) + survived
    more, less = tl.maximum(failed, fails), tl.minimum(failed, fails)
    return survived + log_p, more + log1p_unit(tl.exp(less - more))


@triton.jit
def loss_of_surviving(survived, failed):
    """Return -log(1 - prod_m p_m), the loss of an item that is not true."""
    likely = survived > -0.6931472  # then q < 1/2
    return tl.where(likely, -failed, -tl.log(1.0 - tl.exp(tl.where(likely, -1.0, survived))))


@triton.jit
def slope_of_surviving(u, true, survived, failed, LAW: tl.constexpr):  # noqa: N803
    """Return the derivative of the survival loss with respect to u of a stage; 0 for u = 3e38 (all items survive)."""
    log_p, log_q, rise, _ = tails(u, LAW)
    if LAW == CLIP:  # p is at least 1e-6 in every stage, so nothing overflows
        d = tl.where(true, -1.0, tl.exp(survived - failed)) * rise
    else:
        log_rise = log_q
        if LAW == LAPLACE:
            log_rise = tl.where(u > 0.0, log_q - log_p, 0.0)
        d = tl.where(true, -rise, tl.exp(tl.minimum(survived - failed + log_rise, 0.0)))
    return tl.where(u < 1e38, d, 0.0)
