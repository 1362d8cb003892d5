"""Hard inference over a catalogue: the items that each stage of an export scores, keeps and drops. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recsys_topk.serving.manifest import Manifest, ManifestError, Model, StageEntry
from recsys_topk.serving.requests import EncodedRequests
from recsys_topk.tabular.export_tables import ItemTable
from recsys_topk.types import Array

# A function that returns rows and scores, (B, n) each, best first; -1 and -inf where there are fewer items.
Search = Callable[[EncodedRequests, int], tuple[Array, Array]]

CHUNK = 4096
"""Number of items that are scored at once when the whole catalogue is scored."""


class ModelFaultError(RuntimeError):
    """A model of an export failed, or gave values that are not finite. The request is not to blame."""

    exit_status = 1


class Session:
    """A loaded model of an export. Thread-safe. A call uses `threads` threads; 0 = chosen by onnxruntime."""

    def __init__(self, path: Path, model: Model, threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.model = model
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the exceptions of onnxruntime have no common base class
            raise ManifestError(f"{str(path)!r} cannot be loaded ({first_line(error)}); export again") from error

    def run(self, given: Mapping[str, Array]) -> Array:
        """Return the output for arrays by input name. Arrays are converted to the data types of the inputs.

        Raises a `ModelFaultError` if the model fails or gives values that are not finite.
        """
        inputs = {one.name: np.ascontiguousarray(given[one.name], dtype=one.dtype) for one in self.model.inputs}
        try:
            found: Array = self._session.run([self.model.output], inputs)[0]
        except Exception as error:
            raise ModelFaultError(f"{self.model.file} failed: {first_line(error)}") from error
        if not np.isfinite(found).all():
            raise ModelFaultError(f"{self.model.file} gives values that are not finite (NaN or infinite)")
        return found


@dataclass(frozen=True)
class Passage:
    """The result of one stage for one request."""

    stage: str
    rows: Array  # (N,) rows of the candidates in the catalogue, best first
    scores: Array  # (N,) scores of the candidates, descending. Equal scores keep the order of the input
    quota: int  # number of items that the stage passes on: the first `quota` candidates
    among: Array | None = None  # in the first stage, the rows that it chose from; None = the catalogue
    excluded: Array | None = None  # in the first stage, the rows of these that it must not choose

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
        among: Array | None = None,
    ) -> list[list[Passage]]:
        """Return the results of each stage, for each request.

        `search` finds the best items of the first stage; None = exact search in chunks. `candidates` are, per request,
        the rows of the items that may be recommended (None = all), `excluded` those that must not be. `among` are the
        rows that `search` is limited to, if it is.
        """
        number = len(requests)
        excluded = [np.empty(0, dtype=np.int64)] * number if excluded is None else excluded
        if candidates is not None:
            rows = [np.setdiff1d(own, out) for own, out in zip(candidates, excluded, strict=True)]
            passages = [self._stage(self.first, requests, rows)]
        else:
            passages = [self._retrieve(requests, search or self.exact, excluded)]
            candidates = [among] * number if among is not None else None
        passages[0] = [
            replace(one, among=None if candidates is None else candidates[place], excluded=excluded[place])
            for place, one in enumerate(passages[0])
        ]
        for stage in self.stages[1:]:
            passages.append(self._stage(stage, requests, [one.kept for one in passages[-1]], passages[-1]))
        for one in itertools.chain.from_iterable(passages):
            if not np.isfinite(one.scores).all():
                raise ModelFaultError(f"stage {one.stage!r} gives scores that are not finite (NaN or infinite)")
        return [list(one) for one in zip(*passages, strict=True)]

    def exact(self, requests: EncodedRequests, number: int) -> tuple[Array, Array]:
        """Return the rows and scores of the `number` best items of the first stage for each request, best first.

        Items are scored in chunks, so memory is bounded. Among equal scores, the first item comes first.
        """
        return best_of_chunks(self.chunks(requests), len(requests), number)

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


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def best_of_chunks(chunks: Iterable[tuple[Array, Array]], requests: int, number: int) -> tuple[Array, Array]:
    """Return rows and scores of the `number` best items, (B, number), from chunks of rows (n,) and scores (B, n).

    Rows ascend from chunk to chunk, so that a stable sort keeps the first of equal scores.
    """
    rows, scores = np.empty((requests, 0), dtype=np.int64), np.empty((requests, 0), dtype=np.float32)
    for here, found in chunks:
        order = _best(found, min(number, found.shape[1]))
        rows = np.concatenate([rows, here[order]], axis=1)
        scores = np.concatenate([scores, np.take_along_axis(found, order, 1)], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :number]
        rows, scores = np.take_along_axis(rows, best, 1), np.take_along_axis(scores, best, 1)
    return rows, scores


def search_exactly(
    queries: Array, vectors: Array, number: int, block: int = 1 << 16, names: Array | None = None
) -> tuple[Array, Array]:
    """Return rows and scores of the `number` vectors with the largest dot products, (B, number), best first.

    Queries are (B, D), vectors (C, D), `names` the row numbers of the vectors, ascending (None = 0 to C - 1). Among
    equal scores, the first row comes first. Memory: O(B (block + number)).
    """
    names = np.arange(len(vectors)) if names is None else names
    chunks = ((names[at : at + block], queries @ vectors[at : at + block].T) for at in range(0, len(vectors), block))
    return best_of_chunks(chunks, len(queries), number)


def _best(scores: Array, number: int) -> Array:
    """Return the columns of the `number` largest scores of each row, best first; among equal scores the first one."""
    if number >= scores.shape[1] or np.isnan(scores).any():
        return np.argsort(-scores, axis=1, kind="stable")[:, :number]
    chosen = np.argpartition(-scores, number - 1, axis=1)
    threshold = np.take_along_axis(scores, chosen[:, number - 1 : number], 1)
    # argpartition picks any of the columns that tie at the threshold; a stable sort of all of them picks the first.
    found = np.empty((len(scores), number), dtype=np.int64)
    for row, (own, least) in enumerate(zip(scores, threshold, strict=True)):
        places = np.flatnonzero(own >= least)
        found[row] = places[np.argsort(-own[places], kind="stable")][:number]
    return found
