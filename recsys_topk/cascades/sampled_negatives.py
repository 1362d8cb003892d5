"""Sampled negatives in training: hard negatives, weights of the deployed pool, and checks of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import CascadeObjective, Pool
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


def pool_weights(batch: CascadeBatch, pool: Pool) -> Tensor:
    """Return the number of items of the deployed pool that each candidate stands for, (B, N) float32.

    A logged candidate stands for itself. A sampled one has the weight 1 / pi_i, the inverse of the probability with
    which the sampler put it into its list (`recsys_topk.datamodules.negatives.inclusion`), times pool / C for a pool
    other than the catalogue of C items. The expected sum of w_i f(i) over the sampled items is then that over `pool`
    items of the catalogue, for every function f: also for items that were drawn in proportion to their popularity.

    Args:
        batch: A batch with `CascadeBatch.log_q`.
        pool: The number of items of the pool besides the logged ones, or ``"catalogue"``.
    """
    if not batch.log_q.numel():
        raise ValueError(
            "the batch has no sampled negatives with sampling probabilities, so they cannot stand for the items of a "
            "pool; use --data.train_negatives, e.g. 25 (in a custom loop also data.logq_correction = True), and no "
            "hard negatives"
        )
    scale = 1.0 if pool == "catalogue" else pool / max(1, batch.catalogue_items)
    first_sampled = batch.candidates.shape[1] - batch.sampled
    weights = torch.ones_like(batch.log_q)
    weights[:, first_sampled:] = scale * torch.exp(-batch.log_q[:, first_sampled:])
    return weights


def check_pool(data: Any, objective: CascadeObjective, hard: bool, cuts: Sequence[int]) -> None:
    """Raise if the negatives cannot be weighted to stand for a pool. Otherwise ask the data for their probabilities.

    Args:
        data: The data module, or None.
        objective: An objective with a pool.
        hard: Whether a stage trains on hard negatives.
        cuts: The result of `CascadeObjective.cuts`.
    """
    pool = f"the pool of the {objective.name!r} objective"
    if hard:
        raise ValueError(
            f"{pool} gives sampled negatives the weight 1 / probability, but hard negatives are selected by score, so "
            f"their probability is unknown; use hard_negatives 0"
        )
    if data is None:
        return
    source = getattr(data, "negative_source", None)
    if source == "catalogue" or not getattr(data, "train_negatives", 0):
        option = "--data.negative_source catalogue" if source == "catalogue" else "--data.train_negatives 0"
        raise ValueError(
            f"{pool} is represented by sampled negatives, but {option} draws none; use --data.train_negatives 25 "
            f"--data.negative_source uniform, or another objective"
        )
    if getattr(data, "logq_correction", False):
        raise ValueError(f"{pool} already corrects for the sampling; use --data.logq_correction false")
    length = getattr(data, "list_length", None)
    if cuts and objective.pool != "catalogue" and callable(length):
        items = length("train") - data.train_negatives + (objective.pool or 0)
        if max(cuts) >= items:
            raise ValueError(
                f"a stage passes {max(cuts)} items on, but {pool} has {items} items with the logged ones, so every "
                f"item is selected and nothing is learned; use a larger --objective.pool, or smaller quotas"
            )
    data.sampling_probabilities = True


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
