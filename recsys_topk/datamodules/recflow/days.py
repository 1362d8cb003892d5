"""Days and clock times of RecFlow: dates as strings, times of day in UTC+8 whatever the machine's zone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_ZONE_SECONDS = 8 * 3600
_DAY_SECONDS = 24 * 3600


def clock_ids(seconds: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return weekday (Monday 1 .. Sunday 7), hour (1..24) and minute (1..60) in UTC+8 of seconds since the epoch.

    Args:
        seconds: (n,) integers.

    Returns:
        (n, 3), the ids of the tables weekday, hour and minute, where 0 is padding.

    Example:
        >>> clock_ids(np.array([0]))  # Thursday 1970-01-01 08:00 in Beijing
        array([[4, 9, 1]], dtype=uint8)
    """
    local = np.asarray(seconds, dtype=np.int64) + _ZONE_SECONDS
    days, second = np.divmod(local, _DAY_SECONDS)
    ids = np.empty((local.size, 3), dtype=np.uint8)
    ids[:, 0] = (days + 3) % 7 + 1
    ids[:, 1] = second // 3600 + 1
    ids[:, 2] = second // 60 % 60 + 1
    return ids


def parse_day(text: str) -> dt.date:
    """Return the date written as YYYY-MM-DD, or raise naming what was given."""
    try:
        return dt.date.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"a day is written YYYY-MM-DD, e.g. 2024-01-13; got {text!r}") from None


def midnight(day: dt.date) -> int:
    """Return the seconds since the epoch at which `day` begins in UTC+8."""
    return (day - dt.date(1970, 1, 1)).days * _DAY_SECONDS - _ZONE_SECONDS


def select_days(available: Sequence[str], wanted: str | None, default: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the days that "DATE" or "FIRST:LAST" (both included) names, in order.

    Every day of the range must be there: a hole would silently train on less than was asked for.

    Args:
        available: The days there are.
        wanted: The range, or None for `default`.
        default: The days taken if nothing is asked for.
        name: The option's name, for messages.

    Example:
        >>> select_days(["2024-01-13", "2024-01-14"], "2024-01-13:2024-01-14", [], "train_days")
        ('2024-01-13', '2024-01-14')
    """
    if wanted is None:
        return tuple(default)
    first_text, _, last_text = wanted.partition(":")
    first, last = parse_day(first_text), parse_day(last_text or first_text)
    if last < first:
        raise ValueError(f"{name}={wanted!r} ends before it begins; write FIRST:LAST")
    days = [(first + dt.timedelta(i)).isoformat() for i in range((last - first).days + 1)]
    missing = [day for day in days if day not in set(available)]
    if missing:
        there = f"{available[0]} .. {available[-1]} ({len(available)} days)" if available else "no days"
        lacking = ", ".join(missing[:7]) + (f" and {len(missing) - 7} more" if len(missing) > 7 else "")
        raise ValueError(f"{name}={wanted!r} asks for {lacking}, and the data hold {there}")
    return tuple(days)
