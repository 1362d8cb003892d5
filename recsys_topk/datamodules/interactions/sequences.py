"""Make requests from interactions: sort by user and time, split, cut into histories and positives. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from recsys_topk.tabular.ids.keys import chained
from recsys_topk.types import Array

SplitMethod = Literal["time", "leave_last", "given"]

SPLITS: Final = ("train", "val", "test")
ROW: Final = np.dtype([("user", "i8"), ("item", "i8"), ("time", "i8"), ("weight", "f4"), ("split", "i1")])
"""One interaction: user key, item key or number, time in microseconds, weight, and the number of a given split."""


@dataclass(frozen=True)
class SequenceOptions:
    """Options for making requests from interactions.

    The time of a request is the time of its first positive. Its history holds the user's interactions strictly before
    that time. Its positives are the next interactions. In training each interaction is a positive of one request. In
    evaluation each user has one request, at the beginning of the split.

    Attributes:
        split: ``"time"`` (at `cuts`), ``"leave_last"`` (the last `leave` interactions of each user are for testing, the
            `leave` before them for validation) or ``"given"``.
        cuts: Microseconds at which validation and testing begin.
        leave: See `split`. Users with at most 2 `leave` interactions are used for training only.
        window: Maximum number of positives of a training request; None = no limit.
        eval_window: Maximum number of positives of an evaluation request; None = no limit.
        span: Maximum number of microseconds between the positives of a request; None = no limit.
        repeats: Whether an item that the user had before may be a positive again.
    """

    split: SplitMethod = "time"
    cuts: tuple[int, int] = (0, 0)
    leave: int = 1
    window: int | None = 10
    eval_window: int | None = None
    span: int | None = None
    repeats: bool = False


@dataclass(frozen=True)
class SplitRequests:
    """The requests of a split.

    Attributes:
        user: Index of the user among the distinct users in ascending order.
        start: First event of the user, a row of `Sequences.item`.
        stop: End of the history (exclusive); the history is start..stop-1.
        seen: End (exclusive) of the events that the user had before; in training, of the user's training events.
        tied: End (exclusive) of the events at the time of the last positive; in training, of the user's last training
            event. The items of the events up to `seen` and from `stop` to `tied` are not candidates.
        first: The event that is the first positive.
        ends: End (exclusive) of the positives of each request in `positive`; they begin at the end before.
        positive: The events that are positives, in the order of the requests.
    """

    user: Array
    start: Array
    stop: Array
    seen: Array
    tied: Array
    first: Array
    ends: Array
    positive: Array


@dataclass(frozen=True)
class Sequences:
    """Events of users in time order, and the requests.

    Attributes:
        row: The interaction of each event, a row of the input of `make_sequences`.
        split: The split number of each event.
        requests: The requests of each split.
    """

    row: Array
    split: Array
    requests: dict[str, SplitRequests] = field(default_factory=dict)


def sort_interactions(rows: Array, seed: int = 0, keys: Array | None = None) -> tuple[Array, Array]:
    """Sort interactions by user and time, and drop duplicates.

    Interactions of a user at the same time are ordered by a hash of (user, item, time), so that which of them is the
    last does not depend on the ids: `chained` over the keys of user and item (`id_keys`) and the time in microseconds.

    If interactions agree in user, item and time, the one of the earliest split is kept, then the one of the largest
    weight. The result therefore does not depend on the order of the rows.

    Args:
        rows: (n,) of `ROW`, in any order. Rows that are sorted by user and time cost less.
        seed: Seed of the hash.
        keys: The key of each item, ascending, if `rows` has the numbers of the items; None = it has their keys.

    Returns:
        The interactions that are kept, and their rows in the input.
    """
    user, time = np.ascontiguousarray(rows["user"]), np.ascontiguousarray(rows["time"])
    order = np.arange(rows.size)
    if not ((user[1:] > user[:-1]) | ((user[1:] == user[:-1]) & (time[1:] >= time[:-1]))).all():
        order = np.lexsort((time, user))
    same = ~(_changes(user[order]) | _changes(time[order]))
    if not same.any():
        return rows[order], order
    tied = np.flatnonzero(np.r_[same, False] | np.r_[False, same])
    own = rows[order[tied]]
    tie = chained([own["user"], own["item"] if keys is None else keys[own["item"]], own["time"]], seed)
    run = np.cumsum(np.r_[True, ~same])[tied]
    order[tied] = order[tied][np.lexsort((-own["weight"], own["split"], own["item"], tie, run))]
    item = rows["item"][order]
    fresh = np.r_[True, ~same | _changes(item)]
    order = order[fresh]
    return rows[order], order


def make_sequences(rows: Array, options: SequenceOptions) -> Sequences:
    """Make requests from the interactions of some users. O(n log n).

    Args:
        rows: (n,) of `ROW`, from `sort_interactions`, with items numbered from 0.
        options: Options of the split and the requests.
    """
    if not rows.size:
        return Sequences(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int8))
    user = np.cumsum(np.r_[0, _changes(rows["user"])])
    row, level = _levels(rows, user) if options.split == "given" else (np.arange(rows.size), np.full(rows.size, -1))
    begins = np.r_[True, _changes(user[row]) | _changes(level)]
    segment = np.cumsum(begins) - 1
    time, item = rows["time"][row], rows["item"][row]
    events = np.arange(row.size)
    start = np.flatnonzero(begins)[segment]
    eligible = np.ones(row.size, dtype=bool) if options.repeats else _firsts(segment, item)
    if options.split == "time":
        split = np.searchsorted(np.asarray(options.cuts), time, side="right")
    elif options.split == "leave_last":
        split = _leave_last(segment, eligible, options.leave)
    else:
        split = rows["split"][row].astype(np.int64)
    # Interactions at the same time are not earlier: the history ends before the first event at that time.
    new_time = begins | np.r_[True, _changes(time)]
    run = np.maximum.accumulate(np.where(new_time, events, 0))
    run_end = np.r_[np.flatnonzero(new_time), row.size][np.cumsum(new_time)]
    trained = start + np.bincount(segment[split == 0], minlength=segment[-1] + 1)[segment]
    made = Sequences(row, split.astype(np.int8))
    for number, name in enumerate(SPLITS):
        chosen = np.flatnonzero(eligible & (split == number) & ((level < 0) | (level == number)))
        if chosen.size:
            opens, chosen = _windows(chosen, segment, time, item, options, training=number == 0)
            first, ends = chosen[opens], np.r_[np.flatnonzero(opens)[1:], chosen.size]
            seen = trained[first] if number == 0 else run[first]
            made.requests[name] = SplitRequests(
                user=user[row[first]],
                start=start[first],
                stop=run[first],
                seen=seen,
                tied=run_end[seen - 1 if number == 0 else chosen[ends - 1]],
                first=first,
                ends=ends,
                positive=chosen,
            )
    return made


def _changes(values: Array) -> Array:
    return np.asarray(values[1:] != values[:-1])


def _levels(rows: Array, user: Array) -> tuple[Array, Array]:
    """Return the events of given splits. A user whose splits are not in time order has one sequence per split.

    The sequence of a split holds only interactions of this split and of earlier ones (train, val, test). A training
    history therefore never contains an interaction of the test split, whatever its time.
    """
    falls = np.flatnonzero(~_changes(user) & (rows["split"][1:] < rows["split"][:-1])) + 1
    disordered = np.zeros(user[-1] + 1, dtype=bool)
    disordered[user[falls]] = True
    mixed = disordered[user]
    parts = [np.flatnonzero(~mixed), *(np.flatnonzero(mixed & (rows["split"] <= level)) for level in range(3))]
    return np.concatenate(parts), np.repeat([-1, 0, 1, 2], [part.size for part in parts])


def _firsts(group: Array, item: Array) -> Array:
    """Return a mask of the events that are the first of their item in their group."""
    first = np.zeros(group.size, dtype=bool)
    first[np.unique(group * (int(item.max()) + 1) + item, return_index=True)[1]] = True
    return first


def _leave_last(segment: Array, eligible: Array, leave: int) -> Array:
    """Return split numbers: 2 for the last `leave` eligible events of a segment, 1 for those before, else 0."""
    where = np.flatnonzero(eligible)
    count = np.bincount(segment[where])
    from_end = np.cumsum(count)[segment[where]] - 1 - np.arange(where.size)
    held_out = np.where(from_end < leave, 2, np.where(from_end < 2 * leave, 1, 0))
    split = np.zeros(segment.size, dtype=np.int64)
    split[where] = np.where(count[segment[where]] > 2 * leave, held_out, 0)
    # An event that is not eligible (a repeat) gets the split of the eligible event before it. The first is eligible.
    return split[np.maximum.accumulate(np.where(eligible, np.arange(segment.size), 0))]


def _windows(
    chosen: Array, segment: Array, time: Array, item: Array, options: SequenceOptions, *, training: bool
) -> tuple[Array, Array]:
    """Return which of the chosen events open a request, and the chosen events without those in no request."""
    opens = np.r_[True, _changes(segment[chosen])]
    if training and options.span is not None:
        begin = time[chosen[np.flatnonzero(opens)]][np.cumsum(opens) - 1]
        opens[1:] |= _changes((time[chosen] - begin) // options.span)
    rank = _rank(opens)
    if training and options.window is not None:
        opens = rank % options.window == 0
    elif not training:
        kept = np.ones(chosen.size, dtype=bool) if options.eval_window is None else rank < options.eval_window
        if options.span is not None:
            kept &= time[chosen] - time[chosen[np.flatnonzero(opens)]][np.cumsum(opens) - 1] < options.span
        opens, chosen = opens[kept], chosen[kept]
    if options.repeats:
        kept = _firsts(np.cumsum(opens) - 1, item[chosen])
        opens, chosen = opens[kept], chosen[kept]
    return opens, chosen


def _rank(opens: Array) -> Array:
    """Return the position of each element in its group, from 0."""
    place = np.arange(opens.size)
    return place - np.maximum.accumulate(np.where(opens, place, 0))
