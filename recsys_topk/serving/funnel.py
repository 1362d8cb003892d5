"""Hard inference over a catalogue: the items that each stage of an export scores, keeps and drops. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.serving.manifest import Manifest, StageEntry
from recsys_topk.serving.requests import EncodedRequests
from recsys_topk.serving.session import Session
from recsys_topk.tabular.export_tables import ItemTable

Array = npt.NDArray[Any]
# A function that returns rows and scores, (B, n) each, best first; -1 and -inf where there are fewer items.
Search = Callable[[EncodedRequests, int], tuple[Array, Array]]

CHUNK = 4096
"""Number of items that are scored at once when the whole catalogue is scored."""


@dataclass(frozen=True)
class Passage:
    """The result of one stage for one request."""

    stage: str
    rows: Array  # (N,) rows of the candidates in the catalogue, best first
    scores: Array  # (N,) scores of the candidates, descending. Equal scores keep the order of the input
    quota: int  # number of items that the stage passes on: the first `quota` candidates

    @property
    def kept(self) -> Array:
        """The rows that are passed on, best first."""
        return self.rows[: self.quota]


class StageRunner:
    """Scores items with the exported models of one stage."""

    def __init__(self, folder: Path, entry: StageEntry, threads: int = 1) -> None:
        self.entry = entry
        self._sessions = {role: Session(folder / model.file, model, threads) for role, model in entry.models.items()}

    def request_vectors(self, requests: EncodedRequests) -> Array:
        """Return the request vectors, (B, D), of a stage with towers."""
        return self._sessions["requests"].run(requests.inputs())

    def item_vectors(self, items: ItemTable, rows: Array | slice = slice(None)) -> Array:
        """Return the vectors of the given items, of a stage with towers."""
        return self._sessions["items"].run({"items": items.ids[rows], "item_values": items.values[rows]})

    def scores(self, requests: EncodedRequests, items: ItemTable, rows: Array) -> Array:
        """Return the scores, (B, N), of lists of catalogue rows, (B, N)."""
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
    """The stages of an export over its catalogue."""

    def __init__(self, folder: Path, manifest: Manifest, items: ItemTable, threads: int = 1) -> None:
        self.items = items
        self.stages = [StageRunner(folder, entry, threads) for entry in manifest.stages]

    @property
    def first(self) -> StageRunner:
        """The stage that scores the whole catalogue."""
        return self.stages[0]

    def run(
        self,
        requests: EncodedRequests,
        search: Search | None = None,
        *,
        candidates: Sequence[Array] | None = None,
        excluded: Sequence[Array] | None = None,
    ) -> list[list[Passage]]:
        """Return the results of each stage, for each request.

        Args:
            requests: The requests.
            search: A function that finds the best items of the first stage; None = exact search in chunks.
            candidates: Per request, the rows of the items that may be recommended; None = all.
            excluded: Per request, the rows of items that must not be recommended.
        """
        number = len(requests)
        excluded = [np.empty(0, dtype=np.int64)] * number if excluded is None else excluded
        if candidates is not None:
            rows = [np.setdiff1d(own, out) for own, out in zip(candidates, excluded, strict=True)]
            passages = [self._stage(self.first, requests, rows)]
        else:
            passages = [self._retrieve(requests, search or self.exact, excluded)]
        for stage in self.stages[1:]:
            passages.append(self._stage(stage, requests, [one.kept for one in passages[-1]], passages[-1]))
        return [list(one) for one in zip(*passages, strict=True)]

    def exact(self, requests: EncodedRequests, number: int) -> tuple[Array, Array]:
        """Return the rows and scores of the `number` best items of the first stage for each request, best first.

        Items are scored in chunks, so memory is bounded. Among equal scores, the first item comes first.
        """
        best_rows = np.empty((len(requests), 0), dtype=np.int64)
        best_scores = np.empty((len(requests), 0), dtype=np.float32)
        for rows, scores in self.chunks(requests):
            joined_rows = np.concatenate([best_rows, np.broadcast_to(rows, scores.shape)], axis=1)
            joined = np.concatenate([best_scores, scores], axis=1)
            order = np.argsort(-joined, axis=1, kind="stable")[:, :number]
            best_rows, best_scores = (np.take_along_axis(x, order, 1) for x in (joined_rows, joined))
        return best_rows, best_scores

    def chunks(self, requests: EncodedRequests) -> Iterator[tuple[Array, Array]]:
        """Yield the rows, (n,), and scores of the first stage, (B, n), of all items in order."""
        stage, total = self.first, len(self.items.names)
        vectors = stage.request_vectors(requests) if stage.entry.has_towers else None
        for start in range(0, total, CHUNK):
            rows = np.arange(start, min(start + CHUNK, total))
            if vectors is not None:
                yield rows, vectors @ stage.item_vectors(self.items, rows).T
            else:
                yield rows, stage.scores(requests, self.items, np.broadcast_to(rows, (len(requests), len(rows))))

    def _retrieve(self, requests: EncodedRequests, search: Search, excluded: Sequence[Array]) -> list[Passage]:
        quota = self.first.entry.quota
        # Excluded items are dropped after the search, so more items are searched to fill the quota.
        extra = max((len(out) for out in excluded), default=0)
        rows, scores = search(requests, min(quota + extra, len(self.items.names)))
        found = []
        for own, values, out in zip(rows, scores, excluded, strict=True):
            good = (own >= 0) & ~np.isin(own, out)
            found.append(Passage(self.first.entry.name, own[good][:quota], values[good][:quota], quota))
        return found

    def _stage(
        self, stage: StageRunner, requests: EncodedRequests, lists: Sequence[Array], before: Sequence[Passage] = ()
    ) -> list[Passage]:
        longest = max((len(rows) for rows in lists), default=0)
        padded = np.zeros((len(lists), longest), dtype=np.int64)
        for row, own in zip(padded, lists, strict=True):
            row[: len(own)] = own
        scores = stage.scores(requests, self.items, padded)
        for row, one in zip(scores, before, strict=False):
            row[: len(one.kept)] += np.float32(stage.entry.previous_scale) * one.scores[: one.quota]
        found = []
        for own, values in zip(lists, scores, strict=True):
            order = np.argsort(-values[: len(own)], kind="stable")
            found.append(Passage(stage.entry.name, own[order], values[: len(own)][order], stage.entry.quota))
        return found
