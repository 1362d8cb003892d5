"""Dates and clock times of RecFlow: dates as strings, times of day in UTC+8 on any machine."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

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
    """Return the date written as YYYY-MM-DD. Raise if the text is not such a date."""
    try:
        return dt.date.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"a day is written YYYY-MM-DD, e.g. 2024-01-13; got {text!r}") from None


def midnight(day: dt.date) -> int:
    """Return the seconds since the epoch at which `day` begins in UTC+8."""
    return (day - dt.date(1970, 1, 1)).days * _DAY_SECONDS - _ZONE_SECONDS


def select_days(available: Sequence[str], wanted: str | None, default: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the days of "DATE" or "FIRST:LAST" (inclusive), in order.

    Raise if a day of the range is missing, since training would otherwise use less data than requested.

    Args:
        available: The days of the data set.
        wanted: The range, or None for `default`.
        default: The days used if `wanted` is None.
        name: The name of the option, for error messages.

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


NO_DAY: Final = "none"
"""Value of `val_days` for no validation."""


@dataclass(frozen=True)
class DayOptions:
    """The days selected by the user: each option is "DATE" or "FIRST:LAST" (inclusive), or None for the default.

    Attributes:
        days: The days that may be used; None = all days of the data set.
        train: None = all of `days` before the validation and test days.
        val: None = the second to last day; ``"none"`` = no validation.
        test: None = the last day.
    """

    days: str | None = None
    train: str | None = None
    val: str | None = None
    test: str | None = None

    def used(self, available: Sequence[str]) -> tuple[str, ...]:
        """Return all days that are used. Raise with a list of the missing days if there are any."""
        if (self.train, self.val, self.test) == (None, None, None):
            return select_days(available, self.days, available, "days")
        return tuple(sorted({day for own in self.splits(available).values() for day in own}))

    def splits(self, available: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the days of each split. Raise with a list of the missing days if there are any.

        Args:
            available: The days of the data set, in order.

        Example:
            >>> DayOptions(val="none").splits(["2024-01-13", "2024-01-14", "2024-01-15"])
            {'train': ('2024-01-13', '2024-01-14'), 'val': (), 'test': ('2024-01-15',)}
        """
        used = tuple(available)
        wrong = []
        try:
            used = select_days(available, self.days, available, "days")
        except ValueError as error:
            wrong.append(str(error))
        held_out = 1 if self.val == NO_DAY else 2
        default = {"train": used[:-held_out], "val": used[-2:-1], "test": used[-1:]}
        found: dict[str, tuple[str, ...]] = {}
        for split, by_default in default.items():
            wanted = getattr(self, split)
            try:
                no_day = split == "val" and wanted == NO_DAY
                found[split] = () if no_day else select_days(used, wanted, by_default, f"{split}_days")
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        if len(used) <= held_out and None in (self.train, self.val, self.test):
            apart = "a test day" if held_out == 1 else "a validation and a test day"
            raise ValueError(
                f"the data hold {' and '.join(used)}, too few to set apart {apart}; say which to use with train_days, "
                f"val_days and test_days (val_days none: no validation)"
            )
        return found
