"""`CascadeRecommender` returns the items that survive all stages for given users. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recsys_topk.registry import suggest
from recsys_topk.serving.funnel import Funnel, Passage, best_of_chunks
from recsys_topk.serving.index import CatalogueIndex, encode_catalogue, first_stage, nearest_items
from recsys_topk.serving.manifest import read_manifest
from recsys_topk.serving.requests import EncodedRequests
from recsys_topk.tabular.export_tables import ITEMS, USERS, ItemTable, UserTable
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.types import Array

Name = int | str

ENCODER = "encoder"
"""Name of the folder with the feature encoder in an export."""


class UnknownUserError(ValueError):
    """The export does not contain this user."""


@dataclass(frozen=True)
class Recommendation:
    """An item that survived all stages.

    Attributes:
        item: Name of the item.
        rank: Rank of the item, 1 = best.
        scores: Score of each stage, by stage name.
    """

    item: Name
    rank: int
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """The result of one stage for one item.

    Attributes:
        stage: Name of the stage.
        score: Score of the item.
        cut: Lowest score that was passed on.
        rank: Rank of the item among all items that the stage scored.
        quota: Number of items that the stage passes on.
        passed: Whether the item was passed on.
    """

    stage: str
    score: float
    cut: float
    rank: int
    quota: int
    passed: bool


class CascadeRecommender:
    """Recommends items of the catalogue of an export, with its stages.

    Args:
        folder: Folder of the export.
        index: Folder of an index of the catalogue; None = exact search in the first stage.
        threads: Threads per model call.

    Example::

        recommender = CascadeRecommender.from_export("export")
        recommender.recommend(["user-17"])  # users of the export by name, or
        recommender.recommend([{"age": 31, "history": ["film-3", "film-8"]}])  # features and histories
    """

    def __init__(self, folder: str | Path, index: str | Path | None = None, threads: int = 1) -> None:
        folder = Path(folder)
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.items = ItemTable.read(folder / ITEMS)
        self.users = UserTable.read(folder / USERS) if (folder / USERS).is_file() else None
        self.encoder = FeatureEncoder.load(folder / ENCODER) if (folder / ENCODER).is_dir() else None
        self.funnel = Funnel(folder, self.manifest, self.items, threads)
        self.index = None if index is None else CatalogueIndex(index, self.manifest, threads)
        first = self.funnel.first
        self._vectors = encode_catalogue(first, self.items) if self.index is None and first.entry.has_towers else None

    @classmethod
    def from_export(cls, folder: str | Path, index: str | Path | None = None, threads: int = 1) -> CascadeRecommender:
        """Open an export. Every file is first compared with the manifest."""
        return cls(folder, index, threads)

    @cached_property
    def identity(self) -> str:
        """A short hash of the export; see `Manifest.identity`."""
        return self.manifest.identity

    @property
    def most(self) -> int:
        """Maximum number of recommended items: the quota of the last stage."""
        return self.manifest.stages[-1].quota

    def recommend(
        self,
        users: Sequence[Name | Mapping[str, Any]],
        number: int | None = None,
        *,
        exclude_seen: bool = False,
        allowed: Sequence[Name] | None = None,
        blocked: Sequence[Name] = (),
    ) -> list[list[Recommendation]]:
        """Return the best items of each user.

        Args:
            users: Names of users of the export, or raw features with a history (`EncodedRequests.of_rows`).
            number: Maximum number of items per user; None = the k of the cascade, capped at the last quota.
            exclude_seen: Exclude the items that the user has seen: those of the history, and for users of the export
                all items that they have seen.
            allowed: Recommend only these items. Names that are not in the catalogue are ignored.
            blocked: Never recommend these items.
        """
        number = self.check_number(number)
        passages = self.passages(users, exclude_seen=exclude_seen, allowed=allowed, blocked=blocked)
        return [self._recommendations(own, number) for own in passages]

    def similar(self, item: Name, number: int = 10) -> list[tuple[Name, float]]:
        """Return the nearest items of an item by the item vectors of the first stage, as (name, cosine).

        Args:
            item: Name of the item.
            number: Number of items.
        """
        vectors = self._vectors
        if vectors is None:
            vectors = encode_catalogue(first_stage(self.manifest, self.folder), self.items)
        return nearest_items(vectors, self.items.names, item, number)

    def passages(
        self,
        users: Sequence[Name | Mapping[str, Any]],
        *,
        exclude_seen: bool = False,
        allowed: Sequence[Name] | None = None,
        blocked: Sequence[Name] = (),
    ) -> list[list[Passage]]:
        """Return the results of each stage for each user. The arguments are those of `recommend`."""
        requests = self.requests(users)
        out = _known(self.items, blocked)
        excluded = [np.union1d(seen, out) if exclude_seen else out for seen in requests.seen]
        candidates = None if allowed is None else [_known(self.items, allowed)] * len(requests)
        return self.funnel.run(requests, self._search, candidates=candidates, excluded=excluded)

    def explain(self, user: Name | Mapping[str, Any], item: Name, *, exclude_seen: bool = False) -> list[Verdict]:
        """Return the result of each stage for an item, up to the stage that dropped it.

        Args:
            user: As in `recommend`.
            item: Name of the item.
            exclude_seen: As in `recommend`.
        """
        row = int(self.items.index.rows([item])[0])
        if row < 0:
            raise ValueError(f"the catalogue has no item {item!r}; use a name of an exported item")
        requests = self.requests([user])
        excluded = requests.seen if exclude_seen else None
        if excluded is not None and row in excluded[0]:
            raise ValueError(f"item {item!r} is excluded because the user has seen it; set exclude_seen to False")
        passages = self.funnel.run(requests, self._search, excluded=excluded)[0]
        verdicts = []
        for number, passage in enumerate(passages):
            # The score and the scores it is compared with come from one computation, so that rounding is the same.
            if number:
                scores = passage.scores
                score = float(scores[passage.rows == row][0])
            else:
                scores = np.concatenate([found[0] for _, found in self.funnel.chunks(requests)])
                score = float(scores[row])
                if excluded is not None:
                    scores = np.delete(scores, excluded[0])
            rank = int((scores > score).sum()) + 1
            kept = passage.scores[: passage.quota]
            passed = bool((passage.kept == row).any())
            cut = float(kept[-1]) if len(kept) else -np.inf
            verdicts.append(Verdict(passage.stage, score, cut, rank, passage.quota, passed))
            if not passed:
                break
        return verdicts

    def requests(self, users: Sequence[Name | Mapping[str, Any]]) -> EncodedRequests:
        """Return the encoded requests of users, given all by name or all by features."""
        schema = self.manifest.schema
        rows = [user for user in users if isinstance(user, Mapping)]
        if rows and len(rows) != len(users):
            raise ValueError("users must be given all by name or all by features, got both in one call")
        if rows:
            if self.encoder is None:
                raise ValueError("this export has no encoder for features; give users of the export by name")
            try:
                return EncodedRequests.of_rows(rows, self.encoder, self.items, schema, self.views)
            except (TypeError, OverflowError, NotImplementedError) as error:
                raise ValueError(f"the features cannot be encoded: {error}") from error
        if self.users is None:
            raise ValueError("this export has no users; give features and a history")
        found = self.users.index.rows(list(users))
        if (found < 0).any():
            unknown = users[int(np.argmax(found < 0))]
            near = suggest(str(unknown), [str(name) for name in self.users.names[:10_000]])
            raise UnknownUserError(f"the export has no user {unknown!r}; {near}give features and a history instead")
        return EncodedRequests.of_users(self.users, found, schema)

    @property
    def views(self) -> int:
        """Maximum length of a history; older views are dropped."""
        return int(self.manifest.facts.get("views") or 50)

    def check_number(self, number: int | None) -> int:
        """Return the number of items to recommend. Raise if it exceeds the quota of the last stage."""
        if number is None:
            return min(self.manifest.k, self.most)
        if not 1 <= number <= self.most:
            raise ValueError(f"number must be between 1 and {self.most}, the quota of the last stage, got {number}")
        return number

    def _search(self, requests: EncodedRequests, number: int) -> tuple[Array, Array]:
        if self.index is not None:
            return self.index.search(self.funnel.first.request_vectors(requests), number)
        if self._vectors is None:
            return self.funnel.exact(requests, number)
        return search_exactly(self.funnel.first.request_vectors(requests), self._vectors, number)

    def _recommendations(self, passages: Sequence[Passage], number: int) -> list[Recommendation]:
        rows = passages[-1].kept[:number]
        scores = [dict(zip(one.rows.tolist(), one.scores.tolist(), strict=True)) for one in passages]
        return [
            Recommendation(name, rank, {one.stage: own[row] for one, own in zip(passages, scores, strict=True)})
            for rank, (name, row) in enumerate(
                zip(self.items.names[rows].tolist(), rows.tolist(), strict=True), start=1
            )
        ]


def search_exactly(queries: Array, vectors: Array, number: int, block: int = 1 << 16) -> tuple[Array, Array]:
    """Return rows and scores of the `number` vectors with the largest dot products, (B, number), best first.

    Queries are (B, D), vectors (C, D). Among equal scores, the first row comes first. Memory: O(B (block + number)).
    """
    starts = range(0, len(vectors), block)
    chunks = ((np.arange(len(vectors))[at : at + block], queries @ vectors[at : at + block].T) for at in starts)
    return best_of_chunks(chunks, len(queries), number)


def _known(items: ItemTable, names: Sequence[Name]) -> Array:
    rows = items.index.rows(list(names)) if len(names) else np.empty(0, dtype=np.int64)
    return np.unique(rows[rows >= 0])
