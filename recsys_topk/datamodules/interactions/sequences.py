"""From interactions to requests: sorted by user and time, split, and cut into histories and positives. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SplitMethod = Literal["time", "leave_last", "given"]

SPLITS: Final = ("train", "val", "test")
ROW: Final = np.dtype([("user", "i8"), ("item", "i8"), ("time", "i8"), ("weight", "f4"), ("split", "i1")])
"""An interaction: keys of user and item, microseconds, weight, and number of the split if it is given."""


@dataclass(frozen=True)
class SequenceOptions:
    """How interactions become requests.

    A request stands at the time of its first positive. Its history holds what the user did strictly before that time;
    its positives are the next interactions. In training each interaction is a positive of one request. In evaluation
    each user has one request, at the beginning of the split.

    Attributes:
        split: ``"time"`` (at `cuts`), ``"leave_last"`` (of each user the last `leave` interactions are for testing,
            those before for validation) or ``"given"``.
        cuts: Microseconds at which validation and testing begin.
        leave: See `split`; users with at most 2 `leave` interactions are for training only.
        window: Positives per training request at most; None = no limit.
        eval_window: The same of evaluated requests.
        span: Microseconds that the positives of a request lie within; None = no limit.
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
class Requests:
    """The requests of a split.

    Attributes:
        user: Number of the user, among the distinct ones in ascending order.
        start: First event of the user, a row of `Sequences.item`.
        stop: The event after the last of the history, which is start..stop-1.
        seen: The event after the last that is no candidate, beginning at start.
        first: The event that is the first positive.
        ends: One past the last positive, a row of `positive`; the first is the end before.
        positive: The events that are positives, request by request.
    """

    user: Array
    start: Array
    stop: Array
    seen: Array
    first: Array
    ends: Array
    positive: Array


@dataclass(frozen=True)
class Sequences:
    """Events of users in order, and requests over them.

    Attributes:
        row: The interaction of each event, a row of what `make_sequences` was given.
        split: The number of the split of each event.
        requests: By split.
    """

    row: Array
    split: Array
    requests: dict[str, Requests] = field(default_factory=dict)


def sort_interactions(rows: Array) -> tuple[Array, Array]:
    """Sort interactions by user, time and item, and drop those that are there already.

    Of interactions that agree in user, item and time the one of the earliest split is kept, then that of the largest
    weight, so that the result does not depend on the order of the rows.

    Args:
        rows: (n,) of `ROW`.

    Returns:
        The interactions that are kept, and where they were.
    """
    order = np.lexsort((-rows["weight"], rows["split"], rows["item"], rows["time"], rows["user"]))
    rows = rows[order]
    fresh = np.ones(rows.size, dtype=bool)
    fresh[1:] = _changes(rows["user"]) | _changes(rows["time"]) | _changes(rows["item"])
    return rows[fresh], order[fresh]


def make_sequences(rows: Array, options: SequenceOptions) -> Sequences:
    """Cut the interactions of some users into requests. O(n log n).

    Args:
        rows: (n,) of `ROW`, from `sort_interactions`, with items numbered from 0.
        options: How.
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
    # Equal times are not earlier: the history ends where the run of the first positive's time begins.
    run = np.maximum.accumulate(np.where(begins | np.r_[True, _changes(time)], events, 0))
    trained = start + np.bincount(segment[split == 0], minlength=segment[-1] + 1)[segment]
    made = Sequences(row, split.astype(np.int8))
    for number, name in enumerate(SPLITS):
        chosen = np.flatnonzero(eligible & (split == number) & ((level < 0) | (level == number)))
        if chosen.size:
            opens, chosen = _windows(chosen, segment, time, item, options, training=number == 0)
            first = chosen[opens]
            made.requests[name] = Requests(
                user=user[row[first]],
                start=start[first],
                stop=run[first],
                seen=trained[first] if number == 0 else run[first],
                first=first,
                ends=np.r_[np.flatnonzero(opens)[1:], chosen.size],
                positive=chosen,
            )
    return made


def _changes(values: Array) -> Array:
    return np.asarray(values[1:] != values[:-1])


def _levels(rows: Array, user: Array) -> tuple[Array, Array]:
    """Return the events of given splits. A user whose splits are not in order of time has a sequence for each split.

    That of a split holds only interactions of the split and of earlier ones (train, val, test): nothing of the test
    split enters a history of training, whatever its time.
    """
    falls = np.flatnonzero(~_changes(user) & (rows["split"][1:] < rows["split"][:-1])) + 1
    disordered = np.zeros(user[-1] + 1, dtype=bool)
    disordered[user[falls]] = True
    mixed = disordered[user]
    parts = [np.flatnonzero(~mixed), *(np.flatnonzero(mixed & (rows["split"] <= level)) for level in range(3))]
    return np.concatenate(parts), np.repeat([-1, 0, 1, 2], [part.size for part in parts])


def _firsts(group: Array, item: Array) -> Array:
    """Return which events are the first of their item in their group."""
    first = np.zeros(group.size, dtype=bool)
    first[np.unique(group * (int(item.max()) + 1) + item, return_index=True)[1]] = True
    return first


def _leave_last(segment: Array, eligible: Array, leave: int) -> Array:
    """Return splits: the last `leave` eligible events of each segment are 2, those before 1, the others 0."""
    where = np.flatnonzero(eligible)
    count = np.bincount(segment[where])
    from_end = np.cumsum(count)[segment[where]] - 1 - np.arange(where.size)
    held_out = np.where(from_end < leave, 2, np.where(from_end < 2 * leave, 1, 0))
    split = np.zeros(segment.size, dtype=np.int64)
    split[where] = np.where(count[segment[where]] > 2 * leave, held_out, 0)
    # What is not eligible (a repeat) belongs to the split of the eligible event before it; the first one is eligible.
    return split[np.maximum.accumulate(np.where(eligible, np.arange(segment.size), 0))]


def _windows(
    chosen: Array, segment: Array, time: Array, item: Array, options: SequenceOptions, *, training: bool
) -> tuple[Array, Array]:
    """Return which of the chosen events open a request, and the chosen events, less those that no request has."""
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
    """Return the place of each element in its group, from 0."""
    place = np.arange(opens.size)
    return place - np.maximum.accumulate(np.where(opens, place, 0))
