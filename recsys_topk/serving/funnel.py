"""Hard inference over a catalogue: what each stage of an export scores, keeps and drops. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.deployment import ItemTable
from recsys_topk.serving.manifest import Manifest, StageEntry
from recsys_topk.serving.requests import Requests
from recsys_topk.serving.session import Session

Array = npt.NDArray[Any]
# Returns rows and scores, (B, n) each and best first, -1 and -inf where there are fewer items.
Search = Callable[[Requests, int], tuple[Array, Array]]

CHUNK = 4096
"""Items that are scored at once where the whole catalogue is."""


@dataclass(frozen=True)
class Passage:
    """What one stage did to the candidates of one request.

    Attributes:
        stage: Its name.
        rows: (N,) rows of the candidates in the catalogue, best first.
        scores: (N,) their scores, descending; equal scores stand in the order in which the candidates came.
        quota: How many it passes on: the first `quota` of them.
    """

    stage: str
    rows: Array
    scores: Array
    quota: int

    @property
    def kept(self) -> Array:
        """The rows that are passed on, best first."""
        return self.rows[: self.quota]


class StageRunner:
    """Scores items by the exported models of one stage.

    Args:
        folder: The export.
        entry: The stage.
        threads: Threads of one call.
    """

    def __init__(self, folder: Path, entry: StageEntry, threads: int = 1) -> None:
        self.entry = entry
        self._sessions = {role: Session(folder / model.file, model, threads) for role, model in entry.models.items()}

    def request_vectors(self, requests: Requests) -> Array:
        """Return (B, D); for a stage with towers."""
        return self._sessions["requests"].run(requests.inputs())

    def item_vectors(self, items: ItemTable, rows: Array | slice = slice(None)) -> Array:
        """Return the vectors of some items; for a stage with towers."""
        return self._sessions["items"].run({"items": items.ids[rows], "item_values": items.values[rows]})

    def scores(self, requests: Requests, items: ItemTable, rows: Array) -> Array:
        """Return the scores of lists of items, (B, N), given rows of the catalogue, (B, N)."""
        if not rows.size:
            return np.empty(rows.shape, dtype=np.float32)
        if self.entry.has_towers:
            distinct, places = np.unique(rows, return_inverse=True)
            vectors = self.item_vectors(items, distinct)[places.reshape(rows.shape)]
            found: Array = np.einsum("bd,bnd->bn", self.request_vectors(requests), vectors)
            return found
        lists = {"items": items.ids[rows], "item_values": items.values[rows]}
        return self._sessions["scores"].run({**requests.inputs(), **lists})


class Funnel:
    """The stages of an export over its catalogue.

    Args:
        folder: The export.
        manifest: Its manifest.
        items: Its catalogue.
        threads: Threads of one call of a model.
    """

    def __init__(self, folder: Path, manifest: Manifest, items: ItemTable, threads: int = 1) -> None:
        self.items = items
        self.stages = [StageRunner(folder, entry, threads) for entry in manifest.stages]

    @property
    def first(self) -> StageRunner:
        """The stage that scores the whole catalogue."""
        return self.stages[0]

    def run(
        self,
        requests: Requests,
        search: Search | None = None,
        *,
        candidates: Sequence[Array] | None = None,
        excluded: Sequence[Array] | None = None,
    ) -> list[list[Passage]]:
        """Return what each stage did, for each request.

        Args:
            requests: The requests.
            search: Finds the best items of each request by the first stage; None = exactly, in chunks.
            candidates: For each request the rows of the items that may be recommended; None = all.
            excluded: For each request rows that may not.
        """
        number = len(requests)
        excluded = [np.empty(0, dtype=np.int64)] * number if excluded is None else excluded
        if candidates is not None:
            rows = [np.setdiff1d(own, out) for own, out in zip(candidates, excluded, strict=True)]
            passages = [self._stage(self.first, requests, rows)]
        else:
            passages = [self._retrieve(requests, search or self.exact, excluded)]
        for stage in self.stages[1:]:
            passages.append(self._stage(stage, requests, [one.kept for one in passages[-1]]))
        return [list(one) for one in zip(*passages, strict=True)]

    def exact(self, requests: Requests, number: int) -> tuple[Array, Array]:
        """Return the rows and scores of the `number` best items of each request by the first stage, best first.

        Memory is bounded: items are scored in chunks. Equal scores: the item that stands first.
        """
        best_rows = np.empty((len(requests), 0), dtype=np.int64)
        best_scores = np.empty((len(requests), 0), dtype=np.float32)
        for rows, scores in self.chunks(requests):
            joined_rows = np.concatenate([best_rows, np.broadcast_to(rows, scores.shape)], axis=1)
            joined = np.concatenate([best_scores, scores], axis=1)
            order = np.argsort(-joined, axis=1, kind="stable")[:, :number]
            best_rows, best_scores = (np.take_along_axis(x, order, 1) for x in (joined_rows, joined))
        return best_rows, best_scores

    def chunks(self, requests: Requests) -> Iterator[tuple[Array, Array]]:
        """Yield rows (n,) and scores (B, n) of the first stage, for all items in order."""
        stage, total = self.first, len(self.items.names)
        vectors = stage.request_vectors(requests) if stage.entry.has_towers else None
        for start in range(0, total, CHUNK):
            rows = np.arange(start, min(start + CHUNK, total))
            if vectors is not None:
                yield rows, vectors @ stage.item_vectors(self.items, rows).T
            else:
                yield rows, stage.scores(requests, self.items, np.broadcast_to(rows, (len(requests), len(rows))))

    def _retrieve(self, requests: Requests, search: Search, excluded: Sequence[Array]) -> list[Passage]:
        quota = self.first.entry.quota
        # What is excluded is searched for and dropped, so that the quota is filled all the same.
        extra = max((len(out) for out in excluded), default=0)
        rows, scores = search(requests, min(quota + extra, len(self.items.names)))
        found = []
        for own, values, out in zip(rows, scores, excluded, strict=True):
            good = (own >= 0) & ~np.isin(own, out)
            found.append(Passage(self.first.entry.name, own[good][:quota], values[good][:quota], quota))
        return found

    def _stage(self, stage: StageRunner, requests: Requests, lists: Sequence[Array]) -> list[Passage]:
        longest = max((len(rows) for rows in lists), default=0)
        padded = np.zeros((len(lists), longest), dtype=np.int64)
        for row, own in zip(padded, lists, strict=True):
            row[: len(own)] = own
        scores = stage.scores(requests, self.items, padded)
        found = []
        for own, values in zip(lists, scores, strict=True):
            order = np.argsort(-values[: len(own)], kind="stable")
            found.append(Passage(stage.entry.name, own[order], values[: len(own)][order], stage.entry.quota))
        return found
