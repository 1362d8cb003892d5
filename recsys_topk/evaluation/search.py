"""Exact search of a stage over a whole catalogue: every item is scored in chunks, and the best items are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from recsys_topk.cascades.towers import Towers
from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.ops.selection.ranks import descending_order
from recsys_topk.tabular.schema import VARIANT

PAIRS_AT_ONCE: Final = 1 << 22
"""Maximum number of scores in memory at once, for matrix products."""
ENCODED_AT_ONCE: Final = 8192
_LOWEST: Final = torch.iinfo(torch.int64).min
_ROW_BITS: Final = 0xFFFFFFFF


@dataclass(frozen=True)
class Requests:
    """B requests, with their items as rows of a catalogue.

    Attributes:
        batch: The features of the requests.
        own: (B, N) int64, rows of the items of each list; 0 where masked.
        labels: (B, N), labels of these items; 0 where masked.
        mask: Boolean (B, N), True = an item of the list. An item occurs once, with its largest label.
        excluded: (B, E) int64, distinct rows that are not candidates, without items of the list; -1 = padding.
        own_excluded: Boolean (B, N), items of the list that are also excluded. They remain candidates.
        earlier: (B, H) int64, rows of the user's earlier items, oldest first, followed by -1 (`Shard.earlier`); None =
            not known.
    """

    batch: CascadeBatch
    own: Tensor
    labels: Tensor
    mask: Tensor
    excluded: Tensor
    own_excluded: Tensor
    earlier: Tensor | None = None


@dataclass(frozen=True)
class Candidates:
    """The items that a stage passes on: for each request up to m rows of the catalogue, best first.

    Attributes:
        rows: (B, m) int64; 0 where masked.
        scores: (B, m) float32, the scores of the stage that selected them.
        labels: (B, m), labels of the items of the request's list, 0 for all others.
        mask: Boolean (B, m), False = padding, because there were fewer items.
    """

    rows: Tensor
    scores: Tensor
    labels: Tensor
    mask: Tensor

    def holds(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return which of the given rows, (B, N), are among the candidates of their request."""
        return mask & contains(torch.where(self.mask, self.rows, -1), rows)


class Scorer(Protocol):
    """Protocol of a function from a batch to scores (B, N): a `Stage`, or `Cascade.scorer`."""

    @property
    def towers(self) -> Towers | None:
        """See `Stage.towers`."""

    def __call__(self, batch: CascadeBatch) -> Tensor:
        """Return the scores."""


Search = Callable[[Requests, int], Candidates]
"""A search for the candidates of the first stage: a function of requests and a quota, e.g. `ExactSearch`."""


def requests_of(
    batch: CascadeBatch, items: Catalogue, excluded: Tensor | None = None, earlier: Tensor | None = None
) -> Requests:
    """Return the requests of a batch with catalogue rows. The catalogue must contain all items of their lists.

    Args:
        batch: The batch, without sampled negatives.
        items: The catalogue.
        excluded: (B, E) int64, `Shard.excluded` of the requests.
        earlier: (B, H) int64, `Shard.earlier` of the requests.
    """
    item_id = batch.item_id % VARIANT
    rows = torch.searchsorted(items.item_id, item_id).clamp_max(items.item_id.numel() - 1)
    missing = (items.item_id[rows] != item_id)[batch.candidates] & batch.mask
    if bool(missing.any()):
        raise ValueError(
            f"{int(missing.sum())} items of the lists are not in the evaluated catalogue of {items.item_id.numel()} "
            f"items, e.g. item {int(item_id[batch.candidates[missing]][0])}; `Shard.catalogue` must contain every item "
            f"of the shard's lists"
        )
    list_rows = torch.where(batch.mask, rows[batch.candidates], -1)
    # Two variants of an item in a list are one item of the catalogue; it gets the larger label.
    order = batch.labels.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, list_rows.gather(1, order).argsort(dim=1, stable=True))
    list_rows, labels = list_rows.gather(1, order), batch.labels.gather(1, order)
    mask = _first_of_equals(list_rows) & (list_rows >= 0)
    if excluded is None:
        excluded = list_rows.new_empty((list_rows.shape[0], 0))
    excluded = excluded.sort(1).values
    excluded = torch.where(_first_of_equals(excluded), excluded, -1)
    own_excluded = mask & contains(excluded, list_rows)
    excluded = torch.where(contains(torch.where(mask, list_rows, -1), excluded), -1, excluded)
    list_rows, labels = torch.where(mask, list_rows, 0), torch.where(mask, labels, 0.0)
    return Requests(batch, list_rows, labels, mask, excluded, own_excluded, earlier)


class ExactSearch:
    """Exact search for the best items of a whole catalogue by the scores of a stage: every item is scored.

    The items of a stage with towers are encoded once, and its scores are matrix products in chunks. Any other stage
    scores chunks of the catalogue as lists. The best items so far are kept from chunk to chunk. Items are ordered by
    descending score, then by ascending label (so that ties count against the positives), then by ascending row. NaN
    ranks last. The excluded items of a request are not candidates.

    Cost per request: O(C) scores. Memory: O(B (chunk + quota)), and (C, D) for the vectors of a stage with towers.

    Args:
        stage: The stage, in evaluation mode.
        items: The catalogue, on the device of the stage.
        items_at_once: Number of items that a stage without towers scores at once. With sharded tables it must be the
            same in all processes.
    """

    def __init__(self, stage: Scorer, items: Catalogue, *, items_at_once: int = 512) -> None:
        self.stage, self.items, self.items_at_once = stage, items, items_at_once
        self._vectors: Tensor | None = None

    def __call__(self, requests: Requests, quota: int) -> Candidates:
        """Return the `quota` best items of each request."""
        return best_scored(requests, *self._scorer(requests.batch), self.items.item_id.numel(), quota)

    def _scorer(self, batch: CascadeBatch) -> tuple[Callable[[int, int], Tensor], int]:
        """Return a function that scores the rows start..stop, (B, chunk), and the chunk size."""
        towers = self.stage.towers
        if towers is None:

            def chunk(start: int, stop: int) -> Tensor:
                rows = torch.arange(start, stop, device=self.items.item_id.device)
                candidates = (rows - start).expand(batch.size, -1)
                scores: Tensor = self.stage(with_items(batch, self.items, rows, candidates))
                return scores

            return chunk, self.items_at_once
        vectors, users = self.vectors(batch), request_vectors(towers, batch, self.items)
        return lambda start, stop: users @ vectors[start:stop].T, max(1, PAIRS_AT_ONCE // max(1, batch.size))

    def vectors(self, batch: CascadeBatch) -> Tensor:
        """Return the vectors of all items, (C, D), computed once. The towers need any request as input: `batch`."""
        towers = self.stage.towers
        if towers is None:
            raise ValueError("the stage has no towers, so items have no vectors; use a stage such as two_tower")
        if self._vectors is None:
            request = _first_request(batch)
            parts = []
            for start in range(0, self.items.item_id.numel(), ENCODED_AT_ONCE):
                stop = min(start + ENCODED_AT_ONCE, self.items.item_id.numel())
                rows = torch.arange(start, stop, device=self.items.item_id.device)
                parts.append(towers.encode(with_items(request, self.items, rows, rows[None] - start))[1])
            self._vectors = torch.cat(parts)
        return self._vectors


def request_vectors(towers: Towers, batch: CascadeBatch, items: Catalogue) -> Tensor:
    """Return the vectors of the requests of a batch, (B, D)."""
    first = torch.zeros(1, dtype=torch.int64, device=items.item_id.device)
    return towers.encode(with_items(batch, items, first, first.expand(batch.size, 1)))[0]


def best_scored(
    requests: Requests, score: Callable[[int, int], Tensor], step: int, size: int, number: int
) -> Candidates:
    """Return the best items of each request. They are ordered as in `ExactSearch`.

    Args:
        requests: The requests.
        score: A function that scores the rows start..stop of the catalogue, (B, stop - start).
        step: Number of items to score at once.
        size: Number of items in the catalogue, C.
        number: Number of items per request.
    """
    number = min(number, size)
    best = requests.own.new_full((requests.own.shape[0], number), _LOWEST)
    own_scores = torch.zeros_like(requests.own, dtype=torch.float32)
    removed = torch.cat([torch.where(requests.mask, requests.own, -1), requests.excluded], 1)
    for start in range(0, size, step):
        stop = min(start + step, size)
        scores = score(start, stop).float()
        column = requests.own - start
        inside = requests.mask & (column >= 0) & (column < stop - start)
        chunk_scores = scores.gather(1, column.clamp(0, stop - start - 1))
        own_scores = torch.where(inside, chunk_scores, own_scores)
        keys = torch.nn.functional.pad(_keys(scores, start), (0, 1))  # the last column is for rows of other chunks
        column = torch.where((removed >= start) & (removed < stop), removed - start, stop - start)
        keys.scatter_(1, column, _LOWEST)
        keys[:, -1] = _LOWEST
        best = torch.cat([best, keys], 1).topk(number, 1).values
    others, other_scores = _unpacked(best)
    return best_of(
        torch.cat([others, requests.own], 1),
        torch.cat([other_scores, own_scores], 1),
        torch.cat([torch.zeros_like(other_scores), requests.labels.float()], 1),
        torch.cat([best != _LOWEST, requests.mask], 1),
        number,
    )


def score_candidates(stage: Scorer, requests: Requests, items: Catalogue, found: Candidates, at_once: int) -> Tensor:
    """Return the scores of a stage for the candidates, (B, m) float32, computed `at_once` columns at a time."""
    parts = []
    for start in range(0, found.rows.shape[1], at_once):
        columns = slice(start, start + at_once)
        pool, index = torch.unique(found.rows[:, columns], return_inverse=True)
        parts.append(stage(with_items(requests.batch, items, pool, index, found.mask[:, columns])).float())
    return torch.cat(parts, 1)


def best_of(rows: Tensor, scores: Tensor, labels: Tensor, mask: Tensor, number: int) -> Candidates:
    """Return the `number` best rows, by descending score, ascending label, ascending row. All inputs are (B, m)."""
    order = candidate_order(rows, scores, labels, mask)[:, :number]
    rows, scores, labels, mask = (part.gather(1, order) for part in (rows, scores, labels, mask))
    return Candidates(torch.where(mask, rows, 0), scores, labels, mask)


def candidate_order(rows: Tensor, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the columns of candidates in the order of `best_of`, padding last, (B, m) int64."""
    by_row = torch.where(mask, rows, torch.iinfo(rows.dtype).max).argsort(dim=1, stable=True)
    scores, labels, mask = (part.gather(1, by_row) for part in (scores, labels, mask))
    return by_row.gather(1, descending_order(scores, mask, labels))


def with_items(
    batch: CascadeBatch, items: Catalogue, rows: Tensor, candidates: Tensor, mask: Tensor | None = None
) -> CascadeBatch:
    """Return the requests of a batch with new lists: the pool is `rows` of a catalogue, `candidates` index the pool."""
    full = torch.ones((), dtype=torch.bool, device=candidates.device).expand(candidates.shape)
    return batch.replace(
        item_id=items.item_id[rows],
        items=items.features[rows].long(),
        item_values=items.values[rows] if items.values.shape[1] else NO_VALUES,
        candidates=candidates,
        labels=torch.zeros(candidates.shape, device=candidates.device),
        mask=full if mask is None else mask,
        group=torch.zeros_like(candidates),
    )


def contains(sets: Tensor, rows: Tensor) -> Tensor:
    """Return which of `rows`, (B, n), occur in the set of their request, (B, m). Negative rows never do."""
    if not sets.shape[1]:
        return torch.zeros_like(rows, dtype=torch.bool)
    ordered = sets.sort(1).values
    position = torch.searchsorted(ordered, rows.contiguous()).clamp_max(sets.shape[1] - 1)
    return (ordered.gather(1, position) == rows) & (rows >= 0)


def _first_of_equals(ordered: Tensor) -> Tensor:
    """Return which entries of each sorted row differ from the entry before, boolean (B, n)."""
    first = torch.ones_like(ordered, dtype=torch.bool)
    if ordered.shape[1]:
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return first


def _first_request(batch: CascadeBatch) -> CascadeBatch:
    features = {name: getattr(batch, name)[:1] for name in ("request_id", "request", "history", "history_length")}
    values = {name: getattr(batch, name)[:1] for name in ("request_values", "history_values")}
    return batch.replace(**features, **values)


def _keys(scores: Tensor, first_row: int) -> Tensor:
    """Return int64 sort keys: a larger score, or for equal scores a lower row, has a larger key."""
    limits = torch.finfo(torch.float32)
    x = torch.nan_to_num(scores, nan=limits.min, posinf=limits.max, neginf=limits.min) + 0.0  # -0 becomes 0
    bits = x.view(torch.int32)
    rows = torch.arange(first_row, first_row + scores.shape[1], device=scores.device)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().bitwise_left_shift_(32).bitwise_or_(_ROW_BITS - rows)


def _unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and the scores of keys; row 0 for an empty key."""
    ordered = keys >> 32
    bits = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).int()
    rows = torch.where(keys == _LOWEST, 0, _ROW_BITS - (keys & _ROW_BITS))
    return rows, torch.where(keys == _LOWEST, 0.0, bits.view(torch.float32))
