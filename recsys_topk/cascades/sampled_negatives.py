"""Sampled negatives in training: the hard ones among them, and which losses can correct for the sampling."""

from __future__ import annotations

from typing import Any

import torch

from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch


def keep_hard(batch: CascadeBatch, stage: torch.nn.Module, hard: int, random: int = 0) -> CascadeBatch:
    """Return the batch with fewer sampled negatives: the first `random`, and the `hard` best of the rest by a stage.

    The logged candidates stay. Sampled negatives stand in the last columns in the order in which they were drawn, so
    the first ones are a random choice. They are never items of the list and never excluded ones, so neither are the
    hard ones. The stage scores without gradient and in evaluation mode; nothing of it changes. Masked draws come last.

    Args:
        batch: A batch with `CascadeBatch.sampled` negatives per list.
        stage: Scores the sampled negatives, e.g. the first stage of a cascade with its present weights.
        hard: How many of the best scored to keep.
        random: How many to keep whatever their score.
    """
    assert isinstance(stage, Stage)
    width, drawn = batch.candidates.shape[1], batch.sampled
    if drawn <= hard + random:
        return batch
    if batch.log_q.numel():
        raise ValueError(
            "a batch with log_q has probabilities of all draws; hard negatives are not drawn by chance alone"
        )
    fixed = width - drawn + random
    columns = slice(fixed, width)
    rest = batch.replace(
        **{name: getattr(batch, name)[:, columns] for name in ("candidates", "labels", "mask", "group")}
    )
    was_training = stage.training
    stage.eval()
    with torch.no_grad():
        scores = stage(rest).float()
    stage.train(was_training)
    best = torch.where(rest.mask, scores.nan_to_num(nan=-torch.inf), -torch.inf).topk(hard, 1).indices
    kept = torch.cat([torch.arange(fixed, device=best.device).expand(batch.size, -1), fixed + best], 1)
    parts = {name: getattr(batch, name).gather(1, kept) for name in ("candidates", "labels", "mask", "group")}
    return batch.replace(**parts, sampled=random + hard)


def check_correction(objective: CascadeObjective) -> None:
    """Raise unless a correction for sampling has a meaning: the objective must apply a softmax loss to each stage."""
    if not objective.uses_loss:
        raise ValueError(
            f"the {objective.name!r} objective has terms of its own and takes no logQ correction; use --objective "
            f"independent with --loss softmax, or --data.logq_correction false"
        )
    nothing = torch.zeros(0, 0)
    objective.loss.correct_sampling(nothing, nothing)


def check_negatives(data: Any, objective: CascadeObjective, hard: int, random: int) -> None:
    """Raise if the sampled negatives of a data module cannot be used as asked.

    Args:
        data: The data module, or None.
        objective: The objective.
        hard: `hard_negatives` of the module.
        random: `random_negatives` of the module.
    """
    drawn, corrected = getattr(data, "train_negatives", None), getattr(data, "logq_correction", False)
    if random and not hard:
        raise ValueError("random_negatives goes with hard_negatives; without it every sampled negative is trained on")
    if hard and drawn is not None and drawn <= hard + random:
        raise ValueError(
            f"{drawn} sampled negatives per list leave nothing to choose for hard_negatives={hard} and "
            f"random_negatives={random}; draw more (--data.train_negatives)"
        )
    if corrected:
        check_correction(objective)
        if hard:
            raise ValueError(
                "hard negatives are not in a list by chance alone, so there is no probability to correct for; use "
                "--model.hard_negatives 0, or --data.logq_correction false"
            )
