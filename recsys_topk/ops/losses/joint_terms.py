"""The terms of the joint objective in one pass over the scores of all stages, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import SLACK, add_eps, full_mask
from recsys_topk.ops.backends.machine_code import Kernel
from recsys_topk.ops.backends.task import STAGE_ROWS, Task, address_of, run
from recsys_topk.ops.dispatch import (
    apply,
    is_float32,
    is_last_backward,
    is_real,
    operation,
    runs_triton,
    through_reference,
    wants_graph,
)
from recsys_topk.ops.losses.survival import survival_logs
from recsys_topk.ops.losses.topk_loss import bounded_logs, counted_lists
from recsys_topk.ops.selection.membership import Law
from recsys_topk.processes import divisor, divisors

LONGEST_ON_GPU = 4096  # items of a list; one program holds whole lists

# (scores, k, mask, item weights or None) -> log p and log(1 - p) as they enter a cross-entropy
Logs = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

# The laws whose memberships have a joint objective.
LAWS = ("dftopk", "logistic", "laplace", "clip")
_KERNELS = {
    (law, weighted): Kernel(f"recsys_topk.ops.backends.compiled.joint:{law}_joint{'_weighted' * weighted}")
    for law in LAWS
    for weighted in (False, True)
}


class JointTask(NamedTuple):
    """The arguments of `joint_terms` other than the scores.

    Attributes:
        labels: (B, N), the dtype of the scores.
        mask: Boolean (B, N); None = all items are real.
        k: How many items are wanted; None = each list's number of positives.
        quotas: How many items each stage passes on; None = k.
        above: Items with a label above this are positive.
        law: Which membership; None = that of `logs`, see `joint_losses`.
        item_weights: (B, N), at least 0, constants; None = 1. An item of weight 2 equals two copies of it, an item of
            weight 0 a masked one; k and quotas are then parts of the sum of the weights.
    """

    labels: Tensor
    mask: Tensor | None
    k: int | None
    quotas: tuple[int, ...] | None
    above: float
    law: Law | None
    item_weights: Tensor | None = None


@operation
def joint_terms(scores: Sequence[Tensor], task: JointTask) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each stage's membership, (M,), and of surviving all stages, a scalar.

    Each value is a mean over the lists that count. A list counts if it has a positive item and 0 < k < number of valid
    items. In the term of a stage it must also have more valid items than the stage passes on; otherwise all of its
    items survive that stage.

    Args:
        scores: M tensors (B, N), N >= 2; masked places may hold anything.
        task: The other arguments.
    """
    return mean_terms(*joint_losses(scores, task))


def mean_terms(losses: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of `joint_losses` over the lists that count: of each stage, (M,), and of surviving all."""
    # One sum over processes for all terms, because another process may use the compiled kernel.
    means = losses.sum(1) / divisor(counted.sum(1), losses.dtype)
    return means[:-1], means[-1]


def joint_losses(
    scores: Sequence[Tensor], task: JointTask, logs: Logs | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the losses of the lists and which lists count, (M + 1, B) each: one row per stage, then survival.

    Args:
        scores: M tensors (B, N).
        task: The other arguments of `joint_terms`.
        logs: Computes the memberships, called with scores of 0 where masked; None = by the law of the task.
        eps: Added to the probability inside the logarithms of the cross-entropy.
    """
    labels, k, quotas, law = task.labels, task.k, task.quotas, task.law
    lists = counted_lists(labels, task.mask, k, task.above, task.item_weights)
    items, wanted, counted, target, weights = lists.items, lists.wanted, lists.counted, lists.target, lists.weights
    valid = full_mask(labels) if lists.mask is None else lists.mask
    if logs is None:
        assert law is not None
        logs = partial(bounded_logs, law=law)

    def losses(log_p: Tensor, log_q: Tensor, rows: Tensor) -> Tensor:
        chosen = add_eps(torch.where(target, log_p, log_q), eps)
        chosen = torch.where(valid & rows[:, None], chosen, 0.0)
        return -(chosen if weights is None else chosen * weights).sum(1) / torch.where(items > 0, items, 1)

    terms, where, survivals, anywhere = [], [], [], torch.zeros_like(counted)
    for m, x in enumerate(scores):
        cut = wanted if quotas is None else torch.full_like(items, quotas[m])
        rows = counted & (cut < (items if weights is None else (1.0 - SLACK) * items))
        row = rows[:, None]
        inside = valid & row
        given = None if weights is None else torch.where(row, weights, 1.0)
        real = valid if lists.mask is None else valid | ~row
        log_p, log_q = logs(torch.where(inside, x, 0.0), torch.where(rows, cut, 1), real, given)
        terms.append(losses(log_p, log_q, rows))
        where.append(rows)
        survivals.append((torch.where(inside, log_p, 0.0), torch.where(inside, log_q, -math.inf)))
        anywhere = anywhere | rows
    log_p, log_q = survival_logs(*zip(*survivals, strict=True))
    return torch.stack([*terms, losses(log_p, log_q, anywhere)]), torch.stack([*where, anywhere])


def _serves(scores: Sequence[Tensor], task: JointTask) -> bool:
    return (
        is_float32(*scores, task.labels)
        and (task.item_weights is None or is_real(task.item_weights))
        and not task.labels.requires_grad
        and (task.mask is None or is_real(task.mask))
        and task.law is not None
        and task.law.name in LAWS
        and task.labels.numel() > 0
    )


@joint_terms.backend("numba", _serves)
def _numba(scores: Sequence[Tensor], task: JointTask) -> tuple[Tensor, Tensor]:
    labels, mask, k, quotas, above, law, item_weights = task
    assert law is not None
    stages, (lists, n) = len(scores), labels.shape
    x, y = [one.detach().contiguous() for one in scores], labels.contiguous()
    m = None if mask is None else mask.contiguous()
    w = None if item_weights is None else item_weights.detach().float().contiguous()
    addresses = np.array([one.data_ptr() for one in x], np.int64)
    cuts = None if quotas is None else np.array(quotas, np.int64)
    wants = torch.is_grad_enabled() and any(one.requires_grad for one in scores)
    losses, counted = np.empty((stages + 1, lists), np.float32), np.empty((stages + 1, lists), np.bool_)
    gradients = torch.empty(2, stages, lists, n) if wants else None
    whole = Task(
        lists=lists,
        items=n,
        scores=addresses.ctypes.data,
        labels=y.data_ptr(),
        mask=address_of(m),
        weights=address_of(w),
        ks=0,
        k=-1 if k is None else k,
        stages=stages,
        quotas=0 if cuts is None else cuts.ctypes.data,
        losses=losses.ctypes.data,
        counted=counted.ctypes.data,
        gradient=0 if gradients is None else gradients[0].data_ptr(),
        joint_gradient=0 if gradients is None else gradients[1].data_ptr(),
        above=above,
        tau=law.tau,
        alpha=law.alpha,
        others=1.0,
        scale=1.0 / lists,
    )
    done, _ = run(_KERNELS[law.name, w is not None], whole, STAGE_ROWS * stages + 2)
    if done != lists:  # a score is not finite, or its square overflows
        return joint_terms.reference(scores, task)
    numbers_counted = divisors(counted.sum(1).tolist())
    means = torch.from_numpy((losses.sum(1, dtype=np.float64) / numbers_counted).astype(np.float32))
    if gradients is not None:
        factors = [lists / number for number in numbers_counted]
        means = apply(_WithGradients, _Result(means, gradients, factors, task), *scores)
    return means[:-1], means[-1]


def _serves_triton(scores: Sequence[Tensor], task: JointTask) -> bool:
    given = [x for x in (*scores, task.labels, task.mask) if x is not None]
    known = task.law is not None and task.law.name in LAWS and task.item_weights is None
    fits = 2 <= task.labels.shape[1] <= LONGEST_ON_GPU
    return runs_triton(*given) and known and not task.labels.requires_grad and fits


@joint_terms.backend("triton", _serves_triton, traced=True)
def _triton(scores: Sequence[Tensor], task: JointTask) -> tuple[Tensor, Tensor]:
    from recsys_topk.ops.backends.triton_kernels.joint_terms import joint_terms_triton

    return joint_terms_triton(scores, task)


class _Result(NamedTuple):
    """The result of the compiled kernel.

    Attributes:
        means: (M + 1,), the terms of the stages, then survival.
        gradients: (2, M, B, N): of the terms of the stages, and of survival.
        factors: One number per term, by which its gradient must be multiplied.
        task: The arguments.
    """

    means: Tensor
    gradients: Tensor
    factors: list[float]
    task: JointTask


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: _Result, *scores: Tensor) -> Tensor:
        ctx.save_for_backward(result.gradients, *scores)
        ctx.factors, ctx.task = result.factors, result.task
        return result.means

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, *scores = ctx.saved_tensors
        if wants_graph():

            def formula(*x: Tensor) -> Tensor:
                terms, joint = joint_terms.reference(x, ctx.task)
                return torch.cat([terms, joint[None]])

            return None, *through_reference(formula, scores, [grad])
        *factors, joint = (value * factor for value, factor in zip(grad.tolist(), ctx.factors, strict=True))
        result = gradients[1] if is_last_backward() else gradients[1].clone()
        if joint != 1.0:  # it is 1 in the objective if all lists count
            result.mul_(joint)
        return None, *(
            result[m].add_(gradients[0, m], alpha=factors[m]) if x.requires_grad else None for m, x in enumerate(scores)
        )
