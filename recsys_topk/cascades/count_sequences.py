"""Statistics of the users' training sequences, for the stages that use them."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.stage import Stage


def count_sequences(cascade: Cascade, data: Any, *, held_out: float) -> None:
    """Call `Stage.count` of the stages that implement it.

    Args:
        cascade: The cascade.
        data: The data module, prepared.
        held_out: Share of the interactions of each user, the last ones, that are not counted.
    """
    stages = [s for s in cascade.stages.values() if isinstance(s, Stage) and s.counts_sequences]
    if not stages:
        return
    names: list[str] = [] if data is None else list(data.splits["train"])
    found = data.shard(names[0]).sequences() if len(names) == 1 else None
    if found is None:
        raise ValueError(
            f"the stage {stages[0].name!r} counts which item follows which, and needs the users' sequences; "
            f"use --data interactions, or the stage 'din'"
        )
    user, item_id = found
    length = np.bincount(user)
    place = np.arange(user.size) - (np.cumsum(length) - length)[user]
    counted = place < (length - np.ceil(held_out * length))[user]
    catalogue = data.catalogue(names[0])
    rows = np.searchsorted(catalogue.item_id.numpy(), item_id[counted])
    for stage in stages:
        stage.count(user[counted], catalogue.features.numpy()[rows].astype(np.int64))
