"""Statistics of the users' training sequences, for the stages that use them."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.stage import Stage


def count_sequences(cascade: Cascade, data: Any) -> None:
    """Call `Stage.count` of the stages that implement it.

    Args:
        cascade: The cascade.
        data: The data module, prepared.
    """
    stages = [s for s in cascade.stages.values() if isinstance(s, Stage) and s.counts_sequences]
    if not stages:
        return
    names: list[str] = [] if data is None else list(data.splits["train"])
    shard = data.shard(names[0]) if len(names) == 1 else None
    sequences = None if shard is None else shard.sequences(held_out=False)
    if shard is None or sequences is None:
        raise ValueError(
            f"the stage {stages[0].name!r} counts items in the users' sequences, which these data do not have; "
            f"use --data interactions, another stage, or two_tower without its options popularity and warm_start"
        )
    user, item_id = sequences
    catalogue = data.catalogue(names[0])
    rows = np.searchsorted(catalogue.item_id.numpy(), item_id)
    features, times = catalogue.features.numpy()[rows].astype(np.int64), shard.times(held_out=False)
    for stage in stages:
        stage.count(user, features)
        if times is not None:
            stage.count_times(user, features, times)
