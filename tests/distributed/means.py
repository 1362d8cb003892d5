"""Called in several processes: compares each objective and loss on parts of a batch with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_topk import losses, reference
from recsys_topk.cascades.layers import BatchNorm
from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.cascades.objectives.base import registry as objectives
from recsys_topk.ops.dispatch import backend
from recsys_topk.processes import average, global_batch

LISTS, ITEMS, STAGES, QUOTAS, K = 11, 9, 3, (7, 5, 3), 2


def cases() -> Iterator[tuple[str, CascadeObjective]]:
    for name in losses.available():
        for reduction in ("mean", "sum"):
            loss = losses.get(name, reduction=reduction)
            if loss.operator is not None and not loss.operator.deterministic:
                continue  # the noise of a list depends on its row in the batch
            for objective in ("independent", "joint"):
                cls = objectives.resolve(objective)
                if (not cls.needs_operator or loss.operator is not None) and (objective, reduction) != ("joint", "sum"):
                    yield f"{objective} {name} {reduction}", cls(loss, STAGES)
    for name in objectives.available():
        if not objectives.resolve(name).uses_loss:
            yield name, objectives.resolve(name)(losses.get("dftopk"), STAGES)
    yield "joint by quota", objectives.resolve("joint")(losses.get("dftopk"), STAGES, stage_k="quota")
    yield "joint with eps", objectives.resolve("joint")(losses.get("softsort"), STAGES, eps=1e-6)
    for published, options in ((reference.PublishedICC, {}), (reference.PublishedJoint, {"eps": 1e-6})):
        yield f"published {published.name}", published(losses.get("neuralsort"), STAGES, **options)


def lists() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return lists, the same on every rank; some are skipped by the loss, not equally many per rank."""
    generator = torch.Generator().manual_seed(5)
    scores = [torch.randn(LISTS, ITEMS, generator=generator) for _ in range(STAGES)]
    mask = torch.rand(LISTS, ITEMS, generator=generator) < 0.85
    labels = torch.randint(0, 5, (LISTS, ITEMS), generator=generator).float() * mask
    labels[::4] = 0.0
    mask[3, 2:] = False
    group = torch.where(mask, 4 - labels.long(), -1)
    group[dist.get_world_size() :: dist.get_world_size()] = 0  # only rank 0 has few groups
    return scores, labels, mask, group


def compute(objective: CascadeObjective, rows: slice) -> tuple[Tensor, list[Tensor]]:
    """Return the total with the terms, and the gradients of scores and parameters."""
    scores, labels, mask, group = lists()
    leaves = [x[rows].clone().requires_grad_() for x in scores]
    output = objective(leaves, labels[rows], mask[rows], groups=group[rows], quotas=QUOTAS, k=K)
    inputs = [*leaves, *objective.parameters()]
    gradients = torch.autograd.grad(output.total, inputs, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
    return torch.stack([output.total, *output.terms.values()]).detach(), filled


def difference(objective: CascadeObjective) -> float:
    rank, number = dist.get_rank(), dist.get_world_size()
    part = slice(rank, None, number)
    values, gradients = compute(objective, slice(None))
    with global_batch():
        own_values, own = compute(objective, part)
        found = average(own_values)
        apart = [found - values]
        for m, gradient in enumerate(gradients):
            apart.append(own[m] / number - gradient[part] if m < STAGES else average(own[m]) - gradient)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    return max(
        float(apart[0].abs().max() / values.abs().max().clamp_min(1e-6)),
        *(float(x.abs().max()) / max(scale, 1e-6) for x in apart[1:]),
    )


def batch_norm_difference() -> float:
    """Return the largest difference to torch's batch norm on all rows; rank 0 has a single row."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    x, weights = torch.randn(9, 4), torch.randn(9, 4)
    part = slice(0, 1) if rank == 0 else slice(1 + (rank - 1) * 4, None if rank == dist.get_world_size() - 1 else 5)
    ours, theirs = BatchNorm(4, momentum=0.3), nn.BatchNorm1d(4, momentum=0.3)
    leaf, own = x.clone().requires_grad_(), x[part].clone().requires_grad_()
    for _ in range(2):
        (theirs(leaf) * weights).sum().backward()
        with global_batch():
            (ours(own) * weights[part]).sum().backward()
    with global_batch():
        number = dist.get_world_size()
        pairs = [
            (own.grad, leaf.grad[part]),
            (average(ours.weight.grad) * number, theirs.weight.grad),
            *zip(ours.buffers(), theirs.buffers(), strict=True),
        ]
    return max(float((a - b).abs().max()) for a, b in pairs)


def differences() -> dict[str, float]:
    """Return per case the largest difference between parts and whole, relative to the largest value."""
    with backend("auto"):
        found = {name: difference(objective) for name, objective in cases()}
    with backend("torch"):
        found |= {f"{name} (torch)": difference(objective) for name, objective in cases() if "joint dftopk" in name}
    return {**found, "batch norm": batch_norm_difference()}
