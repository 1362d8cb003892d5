"""Training against the whole catalogue: the first stage with all items, later stages with those that it passes on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import NO_ROWS, NO_VALUES, CascadeBatch
from recsys_topk.losses.base import RankingLoss
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.losses.catalogue_softmax import catalogue_softmax
from recsys_topk.processes import divisor


def catalogue_terms(cascade: Cascade, loss: RankingLoss, batch: CascadeBatch) -> list[Tensor]:
    """Return the loss of each stage for a batch whose pool is the whole catalogue.

    The first stage compares the positives of each list with all items. A later stage trains on the requests
    `CascadeBatch.held_out`, with the items that the stage before it passes on: its `quota` best items that the user
    does not have. Requests whose positive is not among them are skipped. The first stage does not train on these
    requests: it would know their positives better than those of new requests, and later stages would learn to rely on
    it too much (stacking, Wolpert 1992). For the same reason it scores them as in evaluation, without dropout.

    Args:
        cascade: The cascade. Its first stage has towers.
        loss: A loss with a softmax over the list (`RankingLoss.partition_tau`).
        batch: A batch with `CascadeBatch.catalogue`.
    """
    first, *later = cascade.stages.values()
    assert isinstance(first, Stage)
    towers = first.towers
    if loss.partition_tau is None:
        raise ValueError(
            f"the loss {loss.name!r} has no softmax over the list, so it cannot be compared with the whole catalogue; "
            f"use --loss softmax, or --data.negative_source shared"
        )
    if towers is None:
        raise ValueError(
            f"--data.negative_source catalogue needs a first stage with towers, got {first.name!r}; use two_tower, or "
            f"--data.negative_source shared"
        )
    if first.embedding.agree is not None:
        raise ValueError(
            "--data.negative_source catalogue looks up all items at each step, which sharded tables do not allow; use "
            "--data.negative_source shared, or --trainer.strategy ddp"
        )
    requests, items = (x.float() for x in towers.encode(first.readable(batch)))
    positive = batch.mask & (batch.labels > loss.positive_above)
    trained = positive.index_fill(0, batch.held_out, False) if later else positive
    terms = [_first_term(loss.partition_tau, requests, items, batch.candidates, trained, batch.sampled)]
    if not later:
        return terms
    if not batch.held_out.numel():
        return terms + [terms[0].new_zeros(()) for _ in later]
    training, held_out = first.training, held_out_requests(batch)
    with torch.no_grad():
        requests, items = (x.float() for x in towers.eval().encode(first.readable(held_out)))
        lists, scores = passed_on(held_out, requests, items, positive[batch.held_out], cascade.quotas[0])
    first.train(training)
    if may_read(lists.labels) and not lists.labels.any():  # no positive is passed on; the loss would warn
        return terms + [terms[0].new_zeros(()) for _ in later]
    for config, stage in zip(cascade.configs[1:], later, strict=True):
        scores = cascade.add_previous(config.name, stage(lists), scores)
        terms.append(loss(scores, lists.labels, lists.mask, k=config.quota if loss.requires_k else None))
        if stage is not later[-1]:
            lists, scores = _best(lists, scores, config.quota)
    return terms


def check_catalogue_options(data: Any, cascade: Cascade, objective: str, processes: int) -> None:
    """Raise on options that training against the whole catalogue would ignore.

    Args:
        data: The data module, or None.
        cascade: The cascade.
        objective: Name of the objective.
        processes: Number of processes.
    """
    if getattr(data, "negative_source", None) != "catalogue":
        return
    hard = [config.name for config in cascade.configs if config.hard_negatives]
    if objective != "independent":
        raise ValueError(
            f"--data.negative_source catalogue trains each stage by itself, got the objective {objective!r}; "
            f"use --objective independent"
        )
    if hard or data.logq_correction:
        option = f"hard_negatives of stage {hard[0]!r}" if hard else "--data.logq_correction"
        raise ValueError(f"--data.negative_source catalogue samples no negatives, so {option} has no effect; remove it")
    if len(cascade.configs) > 1 and not data.held_out:
        raise ValueError(
            "--data.negative_source catalogue trains later stages on users that the first stage does not train on; "
            "set --data.held_out, e.g. 0.1, or use one stage"
        )
    if any(config.previous == "add" for config in cascade.configs):
        raise ValueError(
            "--data.negative_source catalogue does not train a stage through a later one; use previous: add_detached"
        )
    if processes > 1 and len(cascade.configs) > 1:
        raise ValueError(
            f"later stages with --data.negative_source catalogue need one process, got {processes}; "
            f"use --trainer.devices 1, or one stage"
        )


def _first_term(
    tau: float, requests: Tensor, items: Tensor, candidates: Tensor, positive: Tensor, sample: int
) -> Tensor:
    """Return the mean over lists of the mean over positives i of -log softmax(x / tau)_i, over all items.

    With `sample` > 0, the sum over all items is estimated by `sample_items`.
    """
    number = positive.sum(1)
    weights = positive / number.clamp_min(1)[:, None] / divisor((number > 0).sum(), requests.dtype)
    width = positive.shape[1]
    repeated = requests if width == 1 else requests.repeat_interleave(width, 0)
    target, shift = candidates.flatten(), None
    sample = max(sample, 2 * target.numel()) if sample else len(items)
    if sample < len(items):
        rows, shift = sample_items(target, len(items), sample)
        position = torch.zeros(len(items), dtype=torch.int64, device=items.device)
        target = position.scatter(0, rows, torch.arange(sample, device=items.device))[target]
        items = items[rows]
    return catalogue_softmax(repeated, items, target, weights.flatten(), tau=tau, shift=shift)


def sample_items(targets: Tensor, number: int, sample: int) -> tuple[Tensor, Tensor]:
    """Draw items for a softmax over a large catalogue: all targets, and others uniformly without repeats.

    With T distinct targets, each other item is drawn with the probability r = (S - T) / (C - T). Dividing its
    exponential by r makes the sum over the S items an unbiased estimate of the sum over the catalogue.

    Args:
        targets: int64, rows of the catalogue that must be among the items; fewer than S distinct ones.
        number: Number of items of the catalogue, C.
        sample: Number of items to draw, S.

    Returns:
        The rows, (S,), and the logarithm of the probability of each, which is 0 for targets.
    """
    keys = torch.rand(number, device=targets.device).index_fill_(0, targets, 2.0)
    drawn = keys.topk(sample)
    is_target = drawn.values > 1.0
    distinct = is_target.sum()
    log_rate = torch.log((sample - distinct) / (number - distinct))
    return drawn.indices, torch.where(is_target, 0.0, log_rate)


def held_out_requests(batch: CascadeBatch) -> CascadeBatch:
    """Return the requests `batch.held_out`, with their histories only where the host may read."""
    rows = batch.held_out
    names = ["request_id", "request", "candidates", "labels", "mask", "group"]
    histories = [name for name in ("history", "history_length", "history_values") if getattr(batch, name).numel()]
    names += ["request_values"] if batch.request_values.numel() else []
    if not batch.shares_histories:
        names, histories, history_rows = [*names, *histories, "known"], [], rows
    elif may_read(rows):
        history_rows, row = torch.unique(batch.history_row[rows], return_inverse=True)
        batch = batch.replace(history_row=batch.history_row.index_copy(0, rows, row))
        histories.append("known")
    else:
        history_rows, histories = rows, []
    names += ["history_row", "history_prefix"] if batch.shares_histories else []
    fields = {name: getattr(batch, name)[rows] for name in names}
    return batch.replace(**fields, **{name: getattr(batch, name)[history_rows] for name in histories}, held_out=NO_ROWS)


def passed_on(
    batch: CascadeBatch, requests: Tensor, items: Tensor, positive: Tensor, quota: int
) -> tuple[CascadeBatch, Tensor]:
    """Return the requests with the items that the first stage passes on, and its scores for them.

    Args:
        batch: A batch whose pool is the whole catalogue, C items.
        requests: (B, D), request vectors of the first stage.
        items: (C, D), item vectors.
        positive: Boolean (B, N), the positives.
        quota: Number of items that the first stage passes on.
    """
    positive_rows = torch.where(positive, batch.candidates, -1)
    scores = torch.nn.functional.pad(requests @ items.T, (0, 1))  # the last column is for padding
    column = positive_rows.remainder(scores.shape[1])
    positive_scores = scores.gather(1, column)
    known = batch.known[batch.history_row] if batch.shares_histories else batch.known
    scores.scatter_(1, known.remainder(scores.shape[1]), -math.inf)
    scores.scatter_(1, column, positive_scores)
    scores[:, -1] = -math.inf
    best = scores.topk(min(quota, len(items)), 1)
    labels, real = (best.indices[:, :, None] == positive_rows[:, None]).any(-1), best.values > -math.inf
    lists = batch.replace(
        candidates=best.indices.clamp_max(len(items) - 1),  # a masked candidate may be the column for padding
        labels=labels.float(),
        mask=real,
        group=torch.where(labels, 0, 1),
        log_q=NO_VALUES,
        known=NO_VALUES,
        sampled=0,
        catalogue=False,
    )
    return lists, torch.where(real, best.values, 0.0)


def _best(lists: CascadeBatch, scores: Tensor, number: int) -> tuple[CascadeBatch, Tensor]:
    """Return the `number` best candidates of each list, and their scores."""
    best = torch.where(lists.mask, scores.detach(), -math.inf).topk(min(number, scores.shape[1]), 1).indices
    names = ("candidates", "labels", "mask", "group")
    return lists.replace(**{name: getattr(lists, name).gather(1, best) for name in names}), scores.gather(1, best)
