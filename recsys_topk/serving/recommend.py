"""`CascadeRecommender` returns the items that survive all stages for given users. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recsys_topk.registry import suggest
from recsys_topk.serving.filters import Filter, ItemFilters
from recsys_topk.serving.funnel import Funnel, ModelFaultError, Passage, first_line, search_exactly
from recsys_topk.serving.index import CatalogueIndex, encode_catalogue, first_stage, nearest_items
from recsys_topk.serving.manifest import read_manifest
from recsys_topk.serving.requests import EncodedRequests
from recsys_topk.serving.unknown import about_columns, about_unknown
from recsys_topk.serving.vector_store import StoreIndex, is_store
from recsys_topk.tabular.export_tables import ITEMS, USERS, ItemTable, UserTable
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.types import Array

Name = int | str

ENCODER = "encoder"
"""Name of the folder with the feature encoder in an export."""

_LARGE = 1e6
"""If a model fails on encoded features of a request that are larger than this, the request is to blame."""


class UnknownUserError(ValueError):
    """The export does not contain this user."""


@dataclass(frozen=True)
class Recommendation:
    """An item that survived all stages."""

    item: Name
    rank: int  # 1 = best
    scores: Mapping[str, float]  # by stage name


@dataclass(frozen=True)
class Verdict:
    """The result of one stage for one item."""

    stage: str
    score: float
    cut: float  # lowest score that was passed on
    rank: int  # among all items that the stage scored
    quota: int  # number of items that the stage passes on
    passed: bool


class CascadeRecommender:
    """Recommends items of the catalogue of an export, with its stages.

    Args:
        folder: Folder of the export.
        index: Folder of an index of the catalogue, or the address of a vector store (`StoreIndex`); None = exact search
            in the first stage.
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
        self.filters = ItemFilters(self.encoder, self.manifest.schema, self.items)
        opened = StoreIndex if is_store(index) else CatalogueIndex
        self.index = None if index is None else opened(index, self.manifest, threads)
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
        where: Mapping[str, Sequence[Name]] | None = None,
    ) -> list[list[Recommendation]]:
        """Return the best items of each user.

        Args:
            users: Names of users of the export, or raw features with a history (`EncodedRequests.of_rows`).
            number: Maximum number of items per user; None = the k of the cascade, capped at the last quota.
            exclude_seen: Exclude the items that the user has seen: those of the history, and for users of the export
                all items that they have seen.
            allowed: Recommend only these items. Names that are not in the catalogue are ignored.
            blocked: Never recommend these items.
            where: Recommend only items with these attributes, e.g. ``{"genre": ["comedy", "drama"]}``; see
                `ItemFilters`.
        """
        number = self.check_number(number)
        options: dict[str, Any] = {"exclude_seen": exclude_seen, "allowed": allowed, "blocked": blocked, "where": where}
        return [self.recommendations(own, number) for own in self.passages(users, **options)]

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
        where: Mapping[str, Sequence[Name]] | None = None,
    ) -> list[list[Passage]]:
        """Return the results of each stage for each user. The arguments are those of `recommend`."""
        requests = self.requests(users)
        out = _known(self.items, blocked)
        excluded = [np.union1d(seen, out) if exclude_seen else out for seen in requests.seen]
        chosen = None if allowed is None else _known(self.items, allowed)
        passing = self.filters.find(where) if where else None
        if passing is not None and (chosen is not None or not self.funnel.first.entry.has_towers):
            chosen = passing.rows if chosen is None else np.intersect1d(chosen, passing.rows)
        with self._faults(requests, isinstance(users[0], Mapping)):
            return self.funnel.run(
                requests,
                lambda asked, number: self._search(asked, number, passing),
                candidates=None if chosen is None else [chosen] * len(requests),
                excluded=excluded,
                among=None if passing is None else passing.rows,
            )

    def try_out(self) -> None:
        """Run one request: the first user of the export, or a user without features. Raise if a model fails."""
        if self.users is not None and len(self.users.names):
            self.passages([self.users.names[0].item()])
        elif self.encoder is not None:
            self.passages([{}])

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
        with self._faults(requests, isinstance(user, Mapping)):
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
            return self._of_rows(rows)
        if self.users is None:
            raise ValueError("this export has no users; give features and a history")
        found = self.users.index.rows(list(users))
        if (found < 0).any():
            unknown = users[int(np.argmax(found < 0))]
            near = suggest(str(unknown), [str(name) for name in self.users.names[:10_000]])
            raise UnknownUserError(f"the export has no user {unknown!r}; {near}give features and a history instead")
        return EncodedRequests.of_users(self.users, found, schema)

    def _of_rows(self, rows: Sequence[Mapping[str, Any]]) -> EncodedRequests:
        """Return the encoded features and histories. A known user has stored ones; given ones come first."""
        schema, known = self.manifest.schema, self._known_users(rows)
        histories = np.array([row.get("history") is not None for row in rows])
        # The id may also be the value of a feature, which says nothing new about a known user.
        values = [(row.get("user"), [row[one] for one in self.columns if row.get(one) is not None]) for row in rows]
        features, stored = np.array([any(str(one) != str(user) for one in own) for user, own in values]), None
        if self.users is not None and (known >= 0).any():
            stored = EncodedRequests.of_users(self.users, np.maximum(known, 0), schema)
            if (known >= 0).all() and not (features | histories).any():
                return stored
        if self.encoder is None:
            raise ValueError("this export has no encoder for features; give users of the export by name")
        try:
            made = EncodedRequests.of_rows(rows, self.encoder, self.items, schema, self.views)
        except (TypeError, OverflowError, NotImplementedError) as error:
            raise ValueError(f"the features cannot be encoded: {error}") from error
        return made if stored is None else made.completed(
            stored, (known >= 0) & ~features, (known >= 0) & ~histories, schema
        )  # fmt: skip

    def _known_users(self, rows: Sequence[Mapping[str, Any]]) -> Array:
        """Return the place of the user of each row in the export, -1 if there is none."""
        names = [row.get("user") for row in rows]
        for name in names:
            if name is not None and (isinstance(name, bool) or not isinstance(name, (int, str))):
                raise ValueError(f"the user of a row must be an integer or a string, got {name!r}")
        return np.full(len(rows), -1) if self.users is None else self.users.index.rows(names)

    @cached_property
    def columns(self) -> list[str]:
        """The columns of the features of a request."""
        described = None if self.encoder is None else self.encoder.description
        return [] if described is None else [*described.columns("user"), *described.columns("context")]

    def unknown(
        self,
        users: Sequence[Name | Mapping[str, Any]],
        allowed: Sequence[Name] | None = None,
        blocked: Sequence[Name] = (),
    ) -> list[str]:
        """Return a sentence per kind of name in a request (see `recommend`) that the export does not know."""
        rows = [user for user in users if isinstance(user, Mapping)]
        named = [row["user"] for row in rows if row.get("user") is not None]
        views = [view for row in rows for view in row.get("history") or ()]
        items = [view["item"] if isinstance(view, Mapping) else view for view in views]
        columns = dict.fromkeys(key for row in rows for key in row)
        found = about_columns(columns, [*self.columns, "user", "history"])
        if self.users is not None:
            found += about_unknown("users", named, self.users.index, "have only the given features")
        lists = {"items of histories": items, "allowed items": allowed or (), "blocked items": blocked}
        return found + [text for what, own in lists.items() for text in about_unknown(what, own, self.items.index)]

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

    @contextmanager
    def _faults(self, requests: EncodedRequests, given: bool) -> Iterator[None]:
        """Convert all errors in the context to a `ModelFaultError`, or a ValueError if `given` features are too large.

        The request was checked before, so an error is a fault of the export.
        """
        try:
            yield
        except Exception as error:
            values = np.append(requests.request_values, requests.history_values)
            if given and not (abs(values) <= _LARGE).all():
                raise ValueError("the scores are not finite; check for very large feature values") from error
            fault = str(error) if isinstance(error, ModelFaultError) else first_line(error)
            raise ModelFaultError(f"export {self.identity}: {fault}") from error

    def _search(self, requests: EncodedRequests, number: int, where: Filter | None = None) -> tuple[Array, Array]:
        if self.index is None and self._vectors is None:
            return self.funnel.exact(requests, number)
        queries = self.funnel.first.request_vectors(requests)
        if self.index is not None:
            return self.index.search(queries, number, where)
        assert self._vectors is not None
        if where is None:
            return search_exactly(queries, self._vectors, number)
        return search_exactly(queries, self._vectors[where.rows], number, names=where.rows)

    def recommendations(self, passages: Sequence[Passage], number: int) -> list[Recommendation]:
        """Return the best items of one user, given the results of each stage (`passages`)."""
        rows = passages[-1].kept[:number]
        scores = [dict(zip(one.rows.tolist(), one.scores.tolist(), strict=True)) for one in passages]
        return [
            Recommendation(name, rank, {one.stage: own[row] for one, own in zip(passages, scores, strict=True)})
            for rank, (name, row) in enumerate(
                zip(self.items.names[rows].tolist(), rows.tolist(), strict=True), start=1
            )
        ]


def _known(items: ItemTable, names: Sequence[Name]) -> Array:
    rows = items.index.rows(list(names)) if len(names) else np.empty(0, dtype=np.int64)
    return np.unique(rows[rows >= 0])
