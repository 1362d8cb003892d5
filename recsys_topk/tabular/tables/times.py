"""Convert times of any common form to microseconds since 1970 (UTC), and split them into parts (hour, weekday, ...)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recsys_topk.tabular.tables.columns import one_chunk
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.types import Array

UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds per unit. The other units are ``"ns"``, ``"datetime"`` and the keys of `DIGITS`."""

DIGITS: Final = {"yyyymmdd": 1, "yyyymmddhhmmss": 1_000_000}
"""Formats of dates that are written as one number, e.g. 20231114. The value is the divisor that leaves the day."""

_NAMES: Final = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_DAY: Final = 86_400_000_000
_FIRST_DAY, _LAST_DAY = 19000101, 20991231


def guess_unit(column: Any) -> str:
    """Return the unit of a column of times: ``"datetime"`` for dates, times and text; for numbers, a guess by size.

    If the largest number is below 1e11, the unit is seconds (up to the year 5138); below 1e14 milliseconds; below 1e17
    microseconds; else nanoseconds. The unit is ``"yyyymmdd"`` or ``"yyyymmddhhmmss"`` if the largest number and at
    least half of all numbers are such dates from 1900 to 2099. As seconds these numbers would be days of August 1970,
    as milliseconds days of the year 2570 or later.

    Example:
        >>> import pyarrow as pa
        >>> [guess_unit(pa.array([time])) for time in (881250949, 1705104000000, "2024-01-13", 20240113)]
        ['s', 'ms', 'datetime', 'yyyymmdd']
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        first = next((value.as_py() for value in column if value.is_valid), "")
        try:
            float(first)
        except ValueError:
            return "datetime"
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        return "datetime"
    try:
        numbers = np.asarray(column.cast(pa.float64(), safe=False).drop_null())
    except pa.ArrowInvalid:
        return "datetime"
    numbers = numbers[np.isfinite(numbers)]
    for unit, divisor in DIGITS.items():
        there = (numbers >= _FIRST_DAY * divisor) & (numbers < (_LAST_DAY + 1) * divisor)
        if 2 * np.count_nonzero(there) >= max(numbers.size, 1) and there[np.argmax(numbers)]:
            return unit
    largest = float(np.abs(numbers).max(initial=0))
    return "s" if largest < 1e11 else "ms" if largest < 1e14 else "us" if largest < 1e17 else "ns"


def first_unit(readers: Iterable[TableReader], column: str) -> str | None:
    """Return the unit of the first batch of tables that has any time; None if all times are missing."""
    batches = (one_chunk(batch.column(0)) for reader in readers for batch in reader.batches([column]))
    return next((guess_unit(times) for times in batches if times.null_count < len(times)), None)


def microseconds(column: Any, unit: str, name: str = "time") -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return times as microseconds since 1970 in UTC (0 where missing), and a mask of missing times.

    Args:
        column: A pyarrow array of dates, times, ISO 8601 text or numbers.
        unit: From `guess_unit`.
        name: The column's name, for messages.
    """
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    try:
        if unit == "datetime":
            if numeric:
                raise ValueError(
                    f"column {name!r} has numbers, and dates or text in earlier rows; write all times in one format"
                )
            if text:
                zoned = pc.any(pc.match_substring_regex(column, r"(Z|[+-]\d\d:?\d\d)$")).as_py()
                column = column.cast(pa.timestamp("us", "UTC") if zoned else pa.timestamp("us"))
            if pa.types.is_timestamp(column.type) and column.type.tz:
                column = column.cast(pa.timestamp(column.type.unit))
            column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        elif pa.types.is_temporal(kind):
            return microseconds(column, "datetime", name)
        elif unit in DIGITS:
            column = _from_digits(column.cast(pa.float64(), safe=False), unit, name)
        elif unit == "ns":
            column = pc.divide(column.cast(pa.int64()), 1000)
        elif pa.types.is_integer(kind):
            column = pc.multiply_checked(column.cast(pa.int64()), UNITS[unit])
        else:
            exact = pc.multiply(column.cast(pa.float64()), float(UNITS[unit]))
            exact = pc.if_else(pc.is_finite(exact), exact, None)
            column = pc.round(exact).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {name!r} has a value that is not a time: {' '.join(str(error).split()):.120}; times "
            f"are seconds, milliseconds, ISO 8601 text, datetimes or dates such as 20231114"
        ) from error
    missing = np.asarray(column.is_null())
    found: npt.NDArray[np.int64] = np.asarray(column.fill_null(0))
    return found, missing


def check_one_unit(time: npt.NDArray[np.int64], unit: str, name: str) -> None:
    """Raise a ValueError if some times of a column were probably written in another unit than the rest.

    Seconds among milliseconds are times between 100 s and 4 months after 1970-01-01, with none in the three years
    that follow. Milliseconds among seconds are times after the year 5138.

    Args:
        time: Microseconds, from `microseconds`.
        unit: The unit that they were converted from.
        name: The column's name, for messages.

    Example:
        >>> check_one_unit(np.array([1_600_000_000_000, 1_600_000_000_000_000]), "ms", "ts")
        Traceback (most recent call last):
        ...
        ValueError: column 'ts' mixes units: its times are milliseconds, and 1600000000 would be 1970-01-19; ...
    """
    if unit not in _NAMES:
        return
    size = np.abs(time)
    wrong = size >= 10**17 if unit == "s" else (size >= 10**8) & (size < 10**13)
    if wrong.any() and not (unit != "s" and ((size >= 10**13) & (size < 10**14)).any()):
        example = int(time[np.flatnonzero(wrong)[0]])
        number = example * 1000 if unit == "ns" else example // UNITS[unit]
        raise ValueError(
            f"column {name!r} mixes units: its times are {_NAMES[unit]}, and {number} would be {_date(example)}; write "
            f"all times in one unit"
        )


def _date(time: int) -> str:
    try:
        return str((dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=time)).date())
    except OverflowError:
        return "after the year 9999"


def _from_digits(column: Any, unit: str, name: str) -> Any:
    """Return the microseconds of dates such as 20231114 or 20231114123000, in UTC."""
    missing = np.asarray(column.is_null())
    numbers = np.array(column.fill_null(np.nan), dtype=np.float64)
    missing |= np.isnan(numbers)
    whole = np.where(np.abs(numbers) < 1e15, numbers, 0).astype(np.int64)  # others are rejected below
    day, clock = np.divmod(whole, DIGITS[unit])
    months = (day // 10_000 - 1970) * 12 + day // 100 % 100 - 1
    dates = months.astype("datetime64[M]").astype("datetime64[D]") + (day % 100 - 1)
    seconds = clock // 10_000 * 3600 + clock // 100 % 100 * 60 + clock % 100
    back = dates.astype("datetime64[M]").astype(np.int64)
    wrong = (back != months) | (day < _FIRST_DAY) | (day > _LAST_DAY) | (day // 100 % 100 > 12) | (day % 10_000 < 100)
    wrong |= (clock // 10_000 > 23) | (clock // 100 % 100 > 59) | (clock % 100 > 59) | (whole != numbers)
    wrong &= ~missing
    if wrong.any():
        example = numbers[np.flatnonzero(wrong)[0]]
        raise ValueError(
            f"column {name!r} has dates written {unit}, and {example:.15g} is not such a date; correct it, or write "
            f"the times as seconds since 1970, ISO 8601 text or datetimes"
        )
    found = dates.astype(np.int64) * _DAY + seconds * UNITS["s"]
    return pa.array(found, mask=missing)


def describe_times(unit: str, first: int, last: int) -> str:
    """Return a text with the unit and the range of times, e.g. "seconds, 1997-09-20 to 1998-04-22"."""
    days = []
    for time in (first, last):
        try:
            days.append((dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=int(time))).date().isoformat())
        except OverflowError:
            days.append(str(time))
    return f"{_NAMES.get(unit, 'dates')}{f' written {unit}' if unit in DIGITS else ''}, {days[0]} to {days[1]}"


def time_part(time: Array, part: str, utc_offset: float = 0.0) -> npt.NDArray[np.int64]:
    """Return a part of times, starting at 1: hour 1..24, weekday 1 (Monday)..7, day 1..31, month 1..12, minute 1..60.

    Args:
        time: Microseconds since 1970, UTC.
        part: The name of the part.
        utc_offset: Offset of the wanted time zone from UTC in hours.

    Example:
        >>> time_part(np.array([0]), "weekday"), time_part(np.array([0]), "hour", 8)  # a Thursday, 8 o'clock in Beijing
        (array([4]), array([9]))
    """
    local = np.asarray(time, dtype=np.int64) + round(utc_offset * 3_600_000_000)
    days, rest = np.divmod(local, _DAY)
    if part == "weekday":
        return (days + 3) % 7 + 1
    if part == "hour":
        return rest // 3_600_000_000 + 1
    if part == "minute":
        return rest // 60_000_000 % 60 + 1
    dates = days.astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    if part == "month":
        return months.astype(np.int64) % 12 + 1
    found: npt.NDArray[np.int64] = (dates - months.astype("datetime64[D]")).astype(np.int64) + 1
    return found


def parse_time(text: str) -> int:
    """Return the microseconds since 1970 of a date or time in ISO 8601. It is in UTC unless it contains a time zone.

    Example:
        >>> parse_time("1970-01-02")
        86400000000
    """
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"a date is written YYYY-MM-DD, e.g. 2024-02-01; got {text!r}") from None
    found = found if found.tzinfo else found.replace(tzinfo=dt.UTC)
    return round(found.timestamp()) * 1_000_000
