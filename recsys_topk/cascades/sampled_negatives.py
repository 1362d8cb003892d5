"""Sampled negatives in training: selection of hard negatives, and checks of the logQ correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch


def keep_hard_negatives(batch: CascadeBatch, stage: torch.nn.Module, hard: int, random: int = 0) -> CascadeBatch:
    """Return the batch with fewer sampled negatives: the first `random`, and of the others the `hard` highest-scored.

    The logged candidates are kept. Sampled negatives are in the last columns, in the order in which they were drawn, so
    the first ones are a random choice. They never include items of the list or excluded items. The stage scores without
    gradient and in evaluation mode, and is not changed. Masked draws come last.

    Args:
        batch: A batch with `CascadeBatch.sampled` negatives per list.
        stage: The stage that scores the sampled negatives, e.g. the first stage of a cascade with its current weights.
        hard: Number of highest-scored negatives to keep.
        random: Number of negatives to keep regardless of their score.
    """
    if batch.sampled <= hard + random:
        return batch
    if batch.log_q.numel():
        raise ValueError(
            "hard negatives cannot be combined with log_q: they are selected by score, so their sampling probability "
            "is unknown; use batches without log_q"
        )
    was_training = stage.training
    stage.eval()
    with torch.no_grad():
        scores = stage(batch)
    stage.train(was_training)
    return with_columns(batch, hardest_columns(batch, scores, hard, random))


def hardest_columns(batch: CascadeBatch, scores: Tensor, hard: int, random: int) -> Tensor:
    """Return the columns to keep, (B, N'): the logged candidates, the first `random` draws and the `hard` best others.

    Args:
        batch: A batch with more than hard + random sampled negatives per list.
        scores: (B, N), scores that select the negatives; the selection has no gradient.
        hard: Number of highest-scored negatives to keep.
        random: Number of negatives to keep regardless of their score.
    """
    first = batch.candidates.shape[1] - batch.sampled + random
    rest = scores.detach()[:, first:].float().nan_to_num(nan=-torch.inf)
    best = torch.where(batch.mask[:, first:], rest, -torch.inf).topk(hard, 1).indices
    return torch.cat([torch.arange(first, device=best.device).expand(batch.size, -1), first + best], 1)


def with_columns(batch: CascadeBatch, columns: Tensor) -> CascadeBatch:
    """Return a batch with some columns of its lists, (B, N'): the logged candidates and some of the sampled ones."""
    parts = {name: getattr(batch, name).gather(1, columns) for name in ("candidates", "labels", "mask", "group")}
    removed = batch.candidates.shape[1] - columns.shape[1]
    return batch.replace(**parts, sampled=batch.sampled - removed, log_q=NO_VALUES)


def check_logq_correction(objective: CascadeObjective) -> None:
    """Raise unless a logQ correction applies: the objective must apply a softmax loss to each stage."""
    if not objective.uses_loss:
        raise ValueError(
            f"the {objective.name!r} objective does not use --loss, so a logQ correction does not apply; use "
            f"--objective independent with --loss softmax, or --data.logq_correction false"
        )
    empty = torch.zeros(0, 0)
    objective.loss.correct_sampling(empty, empty)


def check_negatives(data: Any, objective: CascadeObjective, hard: int, random: int) -> None:
    """Raise if the options of sampled negatives contradict each other.

    Args:
        data: The data module, or None.
        objective: The objective.
        hard: `hard_negatives` of the module.
        random: `random_negatives` of the module.
    """
    drawn, corrected = getattr(data, "train_negatives", None), getattr(data, "logq_correction", False)
    if random and not hard:
        raise ValueError("random_negatives requires hard_negatives; without it all sampled negatives are used")
    if hard and drawn is not None and drawn <= hard + random:
        raise ValueError(
            f"hard_negatives={hard} and random_negatives={random} need more than {hard + random} sampled negatives per "
            f"list, got {drawn}; increase --data.train_negatives"
        )
    if corrected:
        check_logq_correction(objective)
        if hard:
            raise ValueError(
                "hard negatives cannot be combined with a logQ correction: they are selected by score, so their "
                "sampling probability is unknown; use --model.hard_negatives 0, or --data.logq_correction false"
            )
