from __future__ import annotations

import datetime as dt
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_topk.datamodules.recflow.days import DayOptions, clock_ids, midnight, select_days

BEIJING = dt.timezone(dt.timedelta(hours=8))


@settings(deadline=None)
@given(st.lists(st.integers(0, 4_000_000_000), min_size=1, max_size=20))
def test_clock_equals_datetime_in_beijing(seconds: list[int]) -> None:
    expected = []
    for second in seconds:
        local = dt.datetime.fromtimestamp(second, BEIJING)
        expected.append([local.weekday() + 1, local.hour + 1, local.minute + 1])
    assert clock_ids(np.array(seconds)).tolist() == expected


def test_clock_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for zone in ("UTC", "America/New_York", "Asia/Shanghai"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        found.append(clock_ids(np.array([1705118400])).tolist())
    monkeypatch.undo()
    time.tzset()
    assert found == [[[6, 13, 1]]] * 3  # 2024-01-13 was a Saturday; noon in Beijing


def test_midnight_is_in_beijing_time() -> None:
    assert dt.datetime.fromtimestamp(midnight(dt.date(2024, 2, 4)), BEIJING) == dt.datetime(2024, 2, 4, tzinfo=BEIJING)


DAYS = ("2024-01-30", "2024-01-31", "2024-02-01", "2024-02-03")


def test_select_days_takes_a_date_or_a_range() -> None:
    assert select_days(DAYS, "2024-01-31", (), "x") == ("2024-01-31",)
    assert select_days(DAYS, "2024-01-30:2024-02-01", (), "x") == DAYS[:3]
    assert select_days(DAYS, None, DAYS[-1:], "x") == DAYS[-1:]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("2024-02-01:2024-02-03", r"train_days='2024-02-01:2024-02-03' asks for 2024-02-02, and the data hold 2024-01"),
        ("2024-03-01:2024-03-09", r"asks for 2024-03-01, .*2024-03-07 and 2 more, and"),
        ("2024-02-01:2024-01-30", r"ends before it begins"),
        ("yesterday", r"written YYYY-MM-DD.*'yesterday'"),
    ],
)
def test_error_for_missing_days_names_them(wanted: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_days(DAYS, wanted, (), "train_days")


def test_subset_of_days_is_split_like_all_days() -> None:
    first, second, third, last = DAYS
    assert DayOptions().splits(DAYS) == {"train": (first, second), "val": (third,), "test": (last,)}
    assert DayOptions(val="none").splits(DAYS) == {"train": (first, second, third), "val": (), "test": (last,)}
    subset = DayOptions("2024-01-30:2024-02-01")
    assert subset.splits(DAYS) == {"train": (first,), "val": (second,), "test": (third,)}
    assert subset.used(DAYS) == DAYS[:3]
    assert DayOptions("2024-01-31").used(DAYS) == (second,)  # one day can be prepared, but not split
    assert DayOptions(train=first, val="none", test=third).used(DAYS) == (first, third)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            DayOptions("2024-01-30:2024-01-31"),
            "2024-01-30 and 2024-01-31, too few to set apart a validation and a test",
        ),
        (DayOptions("2024-01-30", val="none"), "the data hold 2024-01-30, too few to set apart a test day"),
        (DayOptions("2024-01-30:2024-02-01", test="2024-02-03"), "test_days='2024-02-03' asks for 2024-02-03"),
        (DayOptions("2025-01-01", "x", "y", "z"), "days='2025-01-01'.*got 'x'.*got 'y'.*got 'z'"),
        (DayOptions(train="none"), "got 'none'"),
    ],
)
def test_days_that_cannot_be_split_raise(options: DayOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.splits(DAYS)
