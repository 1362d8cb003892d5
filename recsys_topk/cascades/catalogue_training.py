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
from recsys_topk.ops.losses.catalogue_softmax import catalogue_softmax
from recsys_topk.processes import divisor


def catalogue_terms(
    cascade: Cascade, loss: RankingLoss, batch: CascadeBatch, *, first_only: bool = False
) -> list[Tensor]:
    """Return the loss of each stage for a batch whose pool is the whole catalogue.

    The first stage compares the positives of each list with all items. A later stage trains on the requests
    `CascadeBatch.held_out`, with the items that the stage before it passes on: its `quota` best items that the user
    does not have. Requests whose positive is not among them are skipped. The first stage does not train on these
    requests: it would know their positives better than those of new requests, and later stages would learn to rely on
    it too much (stacking, Wolpert 1992).

    Args:
        cascade: The cascade. Its first stage has towers.
        loss: A loss with a softmax over the list (`RankingLoss.partition_tau`).
        batch: A batch with `CascadeBatch.catalogue`.
        first_only: Train the first stage on all requests, and no other stage: the others have the loss 0.
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
    if later and not first_only and not batch.held_out.numel():
        raise ValueError(
            "--data.negative_source catalogue trains later stages on requests that the first stage does not train on; "
            "set --data.held_out, e.g. 0.1, or use one stage"
        )
    requests, items = (x.float() for x in towers.encode(first.readable(batch)))
    positive = batch.mask & (batch.labels > loss.positive_above)
    trained = positive if first_only else positive.index_fill(0, batch.held_out, False)
    terms = [_first_term(loss.partition_tau, requests, items, batch.candidates, trained)]
    if first_only:
        return terms + [terms[0].new_zeros(()) for _ in later]
    if not later:
        return terms
    lists, scores = passed_on(batch, requests, items, positive, cascade.quotas[0])
    for config, stage in zip(cascade.configs[1:], later, strict=True):
        scores = cascade.add_previous(config.name, stage(lists), scores)
        terms.append(loss(scores, lists.labels, lists.mask, k=config.quota if loss.requires_k else None))
        if stage is not later[-1]:
            lists, scores = _best(lists, scores, config.quota)
    return terms


def check_catalogue_options(data: Any, cascade: Cascade, objective: str, refit_epochs: int, processes: int) -> None:
    """Raise on options that training against the whole catalogue, or without it `refit_epochs`, would ignore.

    Args:
        data: The data module, or None.
        cascade: The cascade.
        objective: Name of the objective.
        refit_epochs: `refit_epochs` of the module.
        processes: Number of processes.
    """
    if getattr(data, "negative_source", None) != "catalogue":
        if refit_epochs:
            raise ValueError("refit_epochs needs --data.negative_source catalogue; use it, or --model.refit_epochs 0")
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
    if processes > 1 and (refit_epochs or len(cascade.configs) > 1):
        raise ValueError(
            f"later stages and refit_epochs with --data.negative_source catalogue need one process, got {processes}; "
            f"use --trainer.devices 1, or one stage"
        )


def _first_term(tau: float, requests: Tensor, items: Tensor, candidates: Tensor, positive: Tensor) -> Tensor:
    """Return the mean over lists of the mean over positives i of -log softmax(x / tau)_i, over all items."""
    number = positive.sum(1)
    weights = positive / number.clamp_min(1)[:, None] / divisor((number > 0).sum(), requests.dtype)
    width = positive.shape[1]
    repeated = requests if width == 1 else requests.repeat_interleave(width, 0)
    return catalogue_softmax(repeated, items, candidates.flatten(), weights.flatten(), tau=tau)


def passed_on(
    batch: CascadeBatch, requests: Tensor, items: Tensor, positive: Tensor, quota: int
) -> tuple[CascadeBatch, Tensor]:
    """Return the requests `batch.held_out` with the items that the first stage passes on, and its scores for them.

    Args:
        batch: A batch whose pool is the whole catalogue, C items.
        requests: (B, D), request vectors of the first stage.
        items: (C, D), item vectors.
        positive: Boolean (B, N), the positives.
        quota: Number of items that the first stage passes on.
    """
    rows = batch.held_out
    own = torch.where(positive[rows], batch.candidates[rows], -1)
    with torch.no_grad():
        scores = torch.nn.functional.pad(requests[rows] @ items.T, (0, 1))  # the last column is for padding
        wanted = scores.gather(1, own)
        known = batch.known[batch.history_row[rows] if batch.shares_histories else rows]
        scores.scatter_(1, known.remainder(scores.shape[1]), -math.inf)
        scores.scatter_(1, own.remainder(scores.shape[1]), wanted)
        scores[:, -1] = -math.inf
        best = scores.topk(min(quota, len(items)), 1)
    labels = (best.indices[:, :, None] == own[:, None]).any(-1)
    names = ["request_id", "request"] + [name for name in ("request_values",) if batch.request_values.numel()]
    parts = {name: getattr(batch, name)[rows] for name in names}
    if batch.shares_histories:
        parts |= {"history_row": batch.history_row[rows], "history_prefix": batch.history_prefix[rows]}
    else:
        parts |= {"history": batch.history[rows], "history_length": batch.history_length[rows]}
        parts |= {"history_values": batch.history_values[rows]} if batch.history_values.numel() else {}
    lists = batch.replace(
        **parts,
        candidates=best.indices,
        labels=labels.float(),
        mask=best.values > -math.inf,
        group=torch.where(labels, 0, 1),
        log_q=NO_VALUES,
        known=NO_VALUES,
        held_out=NO_ROWS,
        catalogue=False,
    )
    return lists, (requests[rows][:, None] * items[best.indices]).sum(-1)


def _best(lists: CascadeBatch, scores: Tensor, number: int) -> tuple[CascadeBatch, Tensor]:
    """Return the `number` best candidates of each list, and their scores."""
    best = torch.where(lists.mask, scores.detach(), -math.inf).topk(min(number, scores.shape[1]), 1).indices
    names = ("candidates", "labels", "mask", "group")
    return lists.replace(**{name: getattr(lists, name).gather(1, best) for name in names}), scores.gather(1, best)
