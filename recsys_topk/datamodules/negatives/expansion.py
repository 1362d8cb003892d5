"""Negative sampling: append sampled items to every list, as indices into the pool, on the device of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.negatives.draws import request_keys
from recsys_topk.datamodules.negatives.inclusion import Part, log_correction
from recsys_topk.datamodules.negatives.sampling import Drawn, Occurrences, draw_distinct
from recsys_topk.ops.dispatch import may_read
from recsys_topk.tabular.schema import VARIANT

NegativeSource = Literal["in_batch", "in_global_batch", "uniform", "popularity"]
SharedSource = Literal["shared", "catalogue"]
NegativeMix = NegativeSource | SharedSource | dict[NegativeSource, int]
"""One source, or the number of negatives per list from each source that draws for every list."""

_PART_STEP: Final = 0x5851F42D4C957F2D


@dataclass(frozen=True)
class Expansion:
    """A batch with negatives, and statistics of the draws.

    Attributes:
        batch: The batch; its lists have `number` more columns.
        drawn: Scalar tensor, number of draws used.
        rejected: Scalar tensor, number of these draws that were rejected: items of the list, and repeats.
    """

    batch: CascadeBatch
    drawn: Tensor
    rejected: Tensor


def expand(
    batch: CascadeBatch,
    number: int,
    *,
    seed: int,
    group: int,
    source: NegativeSource | Mapping[NegativeSource, int] = "uniform",
    catalogue: Catalogue | None = None,
    pool_rows: Tensor | None = None,
    excluded: Tensor | None = None,
    log_q: bool = False,
    processes: int = 1,
) -> Expansion:
    """Append `number` sampled negatives to every list, as columns of indices. Features are not copied.

    The negatives of a list are distinct, and none of them is an item of the list. If there are not enough other items,
    the remaining columns are masked. The draws of a request depend on the seed, the request id, its own items and the
    source. Draws from a catalogue do not depend on the rest of the batch.

    Args:
        batch: The batch.
        number: Negatives per list, n.
        seed: The same seed gives the same negatives.
        group: The value of `CascadeBatch.group` for sampled candidates.
        source: ``"in_batch"`` (items of the other lists, in proportion to how often they occur there),
            ``"in_global_batch"`` (the same with the lists of all processes, which exchange (B, N) integers),
            ``"uniform"`` over the catalogue, or ``"popularity"`` (in proportion to how often an item occurs in the
            shard). A mapping gives the number from each source, ``{"in_batch": 20, "uniform": 10}``. They are drawn in
            this order and sum to `number`.
        catalogue: The items of the batch's shard. Only ``"in_batch"`` without `excluded` and `log_q` needs none.
        pool_rows: (M,) the catalogue row of each pool item; None = look it up by item id.
        excluded: (B, E) int64, further catalogue rows that must not be drawn for each list; -1 = padding.
        log_q: Whether to fill `CascadeBatch.log_q` and `catalogue_items`, to correct for the sampling.
        processes: Number of processes whose batches form the global batch. All must call this function together.

    Returns:
        An `Expansion`; its batch has (B, N + n) lists. Sampled candidates have label 0.
    """
    if number < 0:
        raise ValueError(f"the number of negatives must not be negative, got {number}")
    parts = {source: number} if isinstance(source, str) else dict(source)
    if wrong := [name for name in parts if name not in get_args(NegativeSource)]:
        raise ValueError(f"source must be one of {', '.join(get_args(NegativeSource))}, got {wrong[0]!r}")
    if sum(parts.values()) != number or min(parts.values(), default=0) < 0:
        raise ValueError(f"the sources must add up to {number} negatives, got {parts}")
    correction: Tensor | None = None
    if list(parts) == ["in_batch"] and excluded is None and not log_q:
        drawn, columns = _from_batch(batch, request_keys(seed, batch.request_id), number)
    elif catalogue is None:
        reason = f"source={source!r}" if list(parts) != ["in_batch"] else "log_q=True" if log_q else "excluded"
        raise ValueError(
            f"{reason} needs the catalogue of the batch's shard; give catalogue=data.catalogue(batch.shard)"
        )
    else:
        rows = catalogue.rows(batch.item_id) if pool_rows is None else pool_rows
        lists = rows.take(batch.candidates), batch.mask
        everywhere = gather_lists(*lists) if "in_global_batch" in parts and processes > 1 else lists
        made = _draw_parts(batch, parts, seed, catalogue, rows, excluded, everywhere, more=int(log_q))
        drawn = _joined(made)
        if log_q:
            correction = log_correction(made, len(catalogue))
        batch, columns = catalogue.add_to_pool(batch, rows, drawn)
    expanded = batch.replace(
        candidates=torch.cat([batch.candidates, columns], 1),
        labels=torch.nn.functional.pad(batch.labels, (0, number)),
        mask=torch.cat([batch.mask, drawn.mask], 1),
        group=torch.cat([batch.group, torch.where(drawn.mask, group, -1)], 1),
        sampled=number,
    )
    if correction is not None and catalogue is not None:
        padded = torch.nn.functional.pad(correction, (batch.candidates.shape[1], 0))
        expanded = expanded.replace(log_q=padded, catalogue_items=len(catalogue))
    return Expansion(expanded, drawn.drawn, drawn.rejected)


def gather_lists(lists: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lists of all processes, in the order that a single process would have, and their mask.

    Row i of process r of R becomes row i R + r, because `ShardLoader` distributes requests in this way. Processes may
    have different numbers of lists; missing lists are masked.

    Args:
        lists: (B, N) int64.
        mask: (B, N) boolean, True = a real candidate.
    """
    size = torch.tensor(lists.shape, device=lists.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    rows, columns = size.tolist()
    own = torch.nn.functional.pad(
        torch.where(mask, lists, -1), (0, columns - lists.shape[1], 0, rows - lists.shape[0]), value=-1
    )
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    together = torch.stack(parts, 1).flatten(0, 1)
    return together.clamp_min(0), together >= 0


def check_mix(source: NegativeMix, number: int) -> int:
    """Return the total number of negatives per list. Raise a ValueError if `source` is not valid.

    Args:
        source: A source, or the number of negatives from each source.
        number: Negatives per list, used if `source` is a single source.

    Example:
        >>> check_mix("uniform", 25), check_mix({"in_batch": 20, "uniform": 10}, 0)
        (25, 30)
    """
    known = get_args(NegativeSource)
    if isinstance(source, str):
        if source not in (*known, *get_args(SharedSource)):
            every = ", ".join((*known, *get_args(SharedSource)))
            raise ValueError(f"negative_source must be one of {every}, got {source!r}")
        return 0 if source == "catalogue" else number
    for name, count in source.items():
        if name not in known or count < 0:
            raise ValueError(
                f"negative_source must say how many negatives come from {', '.join(known)}, "
                f"e.g. {{in_batch: 20, uniform: 10}}; got {name!r}: {count}"
            )
    return sum(source.values())


def _draw_parts(
    batch: CascadeBatch,
    parts: Mapping[NegativeSource, int],
    seed: int,
    catalogue: Catalogue,
    rows: Tensor,
    excluded: Tensor | None,
    everywhere: tuple[Tensor, Tensor],
    more: int,
) -> list[Part]:
    """Draw from the sources in order. A source does not repeat the items that earlier sources drew for the list."""
    lists = rows.take(batch.candidates)
    own, mask = lists, batch.mask
    if excluded is not None:
        own, mask = torch.cat([own, excluded.clamp_min(0)], 1), torch.cat([mask, excluded >= 0], 1)
    made: list[Part] = []
    for place, (name, number) in enumerate(parts.items()):
        keys = request_keys((seed + place * _PART_STEP) % (1 << 62), batch.request_id)
        share: Tensor | None = None
        if name == "uniform":
            drawn = draw_distinct(catalogue.uniform, keys, own, mask, number)
        else:
            source = catalogue.popular
            if name != "popularity":
                given = (lists, batch.mask) if name == "in_batch" else everywhere
                source = Occurrences.in_lists(*given, len(catalogue))
            drawn = draw_distinct(source, keys, own, mask, number + more)
            share = catalogue.share
        made.append(Part(number, drawn, share, len(catalogue) - _different(own, mask)))
        own, mask = torch.cat([own, made[-1].items], 1), torch.cat([mask, made[-1].mask], 1)
    return made


def _joined(parts: Sequence[Part]) -> Drawn:
    drawn = [part.drawn for part in parts]
    return Drawn(
        torch.cat([part.items for part in parts], 1),
        torch.cat([part.mask for part in parts], 1),
        torch.stack([one.drawn for one in drawn]).sum(),
        torch.stack([one.rejected for one in drawn]).sum(),
        torch.stack([one.tries for one in drawn]).sum(0),
        torch.stack([one.waited for one in drawn]).sum(0),
    )


def _different(items: Tensor, mask: Tensor) -> Tensor:
    """Return the number of distinct items of each list, (B,)."""
    ordered = torch.where(mask, items, -1).sort(1).values
    first = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)[:, : ordered.shape[1]]
    return (first & (ordered >= 0)).sum(1)


def _from_batch(batch: CascadeBatch, keys: Tensor, number: int) -> tuple[Drawn, Tensor]:
    """Draw from the lists of the batch. Return the draws, and the draws as indices into the pool (0 where masked)."""
    size, mask = batch.item_id.numel(), batch.mask
    if may_read(batch.item_id) and not bool((batch.item_id >= VARIANT).any()):
        source = Occurrences.in_lists(batch.candidates, mask, size)
        drawn = draw_distinct(source, keys, batch.candidates, mask, number)
        return drawn, drawn.items
    # Several pool rows may be variants of one item. Draw items, then use one pool row of each item.
    item = _number_items(batch.item_id % VARIANT)
    row = torch.zeros_like(item).scatter_reduce_(0, item, torch.arange(size, device=item.device), "amax")
    own = item[batch.candidates]
    drawn = draw_distinct(Occurrences.in_lists(own, mask, size), keys, own, mask, number)
    return drawn, torch.where(drawn.mask, row[drawn.items], 0)


def _number_items(item_id: Tensor) -> Tensor:
    """Return the index of each id among the sorted distinct ids, without synchronisation (unlike `torch.unique`)."""
    ordered, order = item_id.sort()
    number = torch.nn.functional.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
    return torch.empty_like(order).scatter_(0, order, number[: len(order)])
