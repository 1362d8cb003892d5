"""Feedback on logged lists: events of (request, item) become labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.roles import ROLES
from recsys_topk.tabular.features.guess import guess_roles, require_role
from recsys_topk.tabular.tables.columns import id_column, one_chunk
from recsys_topk.tabular.tables.reader import TableReader

EVENT: Final = ("event", "eventtype", "action", "type")


@dataclass(frozen=True)
class Feedback:
    """A table of events with columns for the request, the item and the kind of event, found by their names.

    Attributes:
        reader: The table.
        labels: The label of each kind of event, best first; other events are ignored.
        groups: The sample group of each kind of event.
    """

    reader: TableReader
    labels: Mapping[str, float]
    groups: Mapping[str, int]

    def batches(self) -> Iterator[Any]:
        """Yield the request, the item (as text), the label and the group of each event that has a label."""
        names = {"request": ROLES["request"], "item": ROLES["item"], "event": EVENT}
        roles = guess_roles(self.reader.columns, tuple(names), names)
        for role in names:
            require_role(self.reader, roles, role)
        for batch in self.reader.batches(list(roles.values())):
            told = one_chunk(batch.column(roles["event"])).cast(pa.string()).to_pylist()
            rows = pa.record_batch({
                **{f"__{role}": id_column(batch.column(roles[role])).cast(pa.string()) for role in ("request", "item")},
                "__label": pa.array([self.labels.get(event, 0.0) for event in told], pa.float32()),
                "__group": pa.array([self.groups.get(event, 0) for event in told], pa.int8()),
            })  # fmt: skip
            yield rows.filter(pa.array(np.array([event in self.labels for event in told])))

    def facts(self) -> list[Any]:
        """Return plain values that change with the content."""
        return [self.reader.fingerprint(), dict(self.labels)]
