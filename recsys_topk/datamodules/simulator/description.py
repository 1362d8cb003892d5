"""What makes a simulated world hard to rank, beside the published statistics of RecFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recsys_topk.datamodules.recflow.layout import STAGES
from recsys_topk.datamodules.simulator.ground_truth import GroundTruth, reference_recalls
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array

if TYPE_CHECKING:
    from recsys_topk.datamodules.recflow.datamodule import RecFlowDataModule

RECFLOW: Final = {
    "days": 37,
    "users": 42_000,
    "requests per user and day": 9.3e6 / 42_000 / 37,
    "rows per item, 3 days": 143 / 10.5,
    "joint recall of 40 logged items": 0.873,
}
"""Published statistics of RecFlow. Rows per item: 143 million rows of 10.5 million videos in three days. The recall is
the best that the LCRON paper (arXiv 2503.09492) reports for trained models on the 40 logged items."""


def group_auc(data: RecFlowDataModule) -> dict[str, float]:
    """Return, for each logged group, the probability that an item is of higher true utility than a sampled item.

    Near 1: easy to tell from random items. Below 0.5: worse than random items, so that sampled negatives are the harder
    ones. Measured on the test days with the negatives of the evaluation.

    Args:
        data: A prepared data module of a simulated world, with `eval_negatives` above 0.
    """
    truth = GroundTruth.load(str(data.cache.files.folder.parent))
    names = [group.stage for group in data.layout.groups]
    found: list[list[Array]] = [[] for _ in names]
    for day_batch in data.test_dataloader():
        batch = data.add_negatives(day_batch)
        items = batch.item_id[batch.candidates].numpy() % VARIANT
        utility = truth.true_utility(batch.request_id.numpy(), items)
        sampled = batch.group.numpy() == len(names)
        drawn = np.sort(np.where(sampled, utility, np.inf), axis=1)
        for row, group in enumerate(batch.group.numpy()):
            for number, aucs in enumerate(found):
                below = np.searchsorted(drawn[row], utility[row, group == number])
                aucs.append(below / max(1, int(sampled[row].sum())))
    return {name: float(np.concatenate(aucs).mean()) for name, aucs in zip(names, found, strict=True)}


def describe_world(data: RecFlowDataModule) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles and tables: size beside RecFlow's, difficulty of each logged group, and recalls of oracles.

    Args:
        data: A prepared data module of a simulated world.
    """
    truth = GroundTruth.load(str(data.cache.files.folder.parent))
    config = truth.world.config
    days = [data.cache.open(name) for name in config.day_names]
    rows = [np.concatenate([day.requests[stage] for stage in STAGES], axis=1) for day in days]
    ids = [day.catalogue["item_id"][one[one >= 0]] % VARIANT for day, one in zip(days, rows, strict=True)]
    three = np.concatenate(ids[-3:])
    logged = reference_recalls(_without_negatives(data))["oracle"]["joint"]
    ours = {
        "days": config.days,
        "users": int(np.unique(truth.user).size),
        "requests per user and day": truth.user.size / np.unique(truth.user).size / config.days,
        "rows per item, 3 days": three.size / np.unique(three).size,
        "joint recall of 40 logged items": logged,
    }
    yield (
        "size; the last row is the oracle here, the best trained model there",
        [{"": name, "this world": value, "RecFlow": RECFLOW[name]} for name, value in ours.items()],
    )
    yield "AUC of the true utility against sampled items", [group_auc(data)]
    yield (
        f"recall with {data.eval_negatives} {data.eval_negative_source} negatives",
        [{"ranker": name, **values} for name, values in reference_recalls(data, parts=True).items()],
    )


def _without_negatives(data: RecFlowDataModule) -> RecFlowDataModule:
    from recsys_topk.datamodules.base import restore

    made: Any = restore(data.hparams, eval_negatives=0)
    return made  # type: ignore[no-any-return]
