"""The laws DFTOPK, LOGISTIC and LAPLACE: the formulas that the kernels of the losses and of the joint objective share.

The law is a constant of a kernel, so that the compiler drops the branches of the others.
"""

from __future__ import annotations

from typing import Any

from recsys_topk.ops.backends.compiled.arithmetic import ONE, TWO, ZERO, exp_negative, magnitude
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import where
from recsys_topk.ops.backends.compiled.thresholds import threshold
from recsys_topk.ops.backends.task import DFTOPK, LAPLACE


@inlined
def law_threshold(law: Any, task: Any, v: Any, q: Any, facts: Any) -> Any:
    """Return base and b, the logit of a score x being (x - base - b) / tau, and the logit of the nearest item.

    The last is 0 for DFTOPK, which does not need it. See `threshold` for the arguments.
    """
    if law == DFTOPK:
        return facts.cut + task.alpha * (facts.kept - facts.cut), ZERO, ZERO
    at, near = threshold(law, v, q, task.size, facts, task.tau)
    return facts.cut, at, near


@inlined
def law_terms(law: Any, logit: Any, sign: Any, near: Any, unit: Any) -> Any:
    """Return the factor, the slope, the rise and the share of 16 items.

    With t = s u, s = -1 for the true items and 1 for the others, the loss of an item is max(t, 0) + log(1 + factor):
    softplus(t), or -log F(-t) for LAPLACE. The slope is its derivative with respect to the logit u, free of
    cancellation. The rise is d log p / du (not for LAPLACE). The share is the density of the law in units of
    exp(-near), so that shares are finite however far all items are; the derivative of the threshold with respect to a
    score is its part of their sum.

    Args:
        law: DFTOPK, LOGISTIC or LAPLACE.
        logit: u.
        sign: s.
        near: The smallest abs(u).
        unit: exp(-near).
    """
    t = logit * sign
    share = exp_negative(near - magnitude(logit))
    e = share * unit
    if law == LAPLACE:
        factor = where(t >= ZERO, ONE, e / (TWO - e))
        return factor, factor * sign, factor, share
    inverse = ONE / (e + ONE)
    rise = where(logit > ZERO, e, ONE) * inverse
    return e, where(t >= ZERO, ONE, e) * inverse * sign, rise, share * (inverse * inverse)


@inlined
def law_moves(law: Any, score: Any, share: Any, kept: Any, cut: Any, at_kept: Any, at_cut: Any) -> Any:
    """Return the derivative of the threshold with respect to 16 scores.

    Args:
        law: DFTOPK, LOGISTIC or LAPLACE.
        score: The scores.
        share: Their shares (see `law_terms`).
        kept: x_[k].
        cut: x_[k+1].
        at_kept: The derivative for an item at x_[k]. For other laws than DFTOPK: per unit of the share.
        at_cut: The derivative for an item at x_[k+1].
    """
    if law == DFTOPK:
        return where(score == kept, at_kept, ZERO) + where(score == cut, at_cut, ZERO)
    return share * at_kept
