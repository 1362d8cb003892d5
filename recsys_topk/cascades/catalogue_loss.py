"""The softmax loss of a stage with towers against every item of the catalogue."""

from __future__ import annotations

from torch import Tensor, nn

from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.losses.base import RankingLoss
from recsys_topk.ops.losses.catalogue_softmax import catalogue_softmax
from recsys_topk.processes import divisor


def catalogue_loss(loss: RankingLoss, stage: nn.Module, batch: CascadeBatch) -> Tensor:
    """Return the mean over lists of the mean over positives i of -log softmax(x / tau)_i, over all items.

    The lists of the batch hold the positives, and its pool is the whole catalogue. Each positive competes with every
    item, also with the other positives of its list. The scores (B, C) are never stored (`catalogue_softmax`).

    Args:
        loss: A loss with a softmax over the list (`RankingLoss.partition_tau`).
        stage: A stage with towers.
        batch: A batch with `CascadeBatch.catalogue`.
    """
    assert isinstance(stage, Stage)
    tau, towers = loss.partition_tau, stage.towers
    if tau is None:
        raise ValueError(
            f"the loss {loss.name!r} has no softmax over the list, so it cannot be compared with the whole catalogue; "
            f"use --loss softmax, or --data.negative_source shared"
        )
    if towers is None:
        raise ValueError(
            f"--data.negative_source catalogue needs a first stage with towers, got {stage.name!r}; use two_tower, or "
            f"--data.negative_source shared"
        )
    requests, items = towers.encode(stage.readable(batch))
    positive = batch.mask & (batch.labels > loss.positive_above)
    number = positive.sum(1)
    weights = positive / number.clamp_min(1)[:, None] / divisor((number > 0).sum(), requests.dtype)
    width = positive.shape[1]
    repeated = requests if width == 1 else requests.repeat_interleave(width, 0)
    return catalogue_softmax(repeated.float(), items.float(), batch.candidates.flatten(), weights.flatten(), tau=tau)
